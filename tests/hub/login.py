"""On a rehearsal's login node: a hub, a person's server in a job, what it answers by way of the hub's proxy, its end.

python login.py CONFIG TOKEN        prints a line of JSON for each
"""

from __future__ import annotations

import getpass
import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path


def ask(path: str, method: str = "GET"):
    request = urllib.request.Request(f"http://127.0.0.1:8000/{path}", method=method)
    request.add_header("Authorization", f"token {sys.argv[2]}")
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read() or "null")


def until(look, seconds: float = 200):
    """What `look` finds; it may fail before."""
    end = time.monotonic() + seconds
    while True:
        try:
            if found := look():
                return found
        except OSError:  # nobody listens yet, or an answer of 4xx or 5xx
            if time.monotonic() > end:
                raise
        if time.monotonic() > end:
            raise SystemExit(f"not within {seconds} s")
        time.sleep(0.5)


def jobs() -> list[str]:
    words = ["squeue", "--noheader", "--states=all", "--format=%T %a %C %N"]
    return subprocess.run(words, capture_output=True, text=True).stdout.split()


def main(me: str) -> None:
    until(lambda: ask("hub/api/"))
    ask(f"hub/api/users/{me}", "POST")
    ask(f"hub/api/users/{me}/server", "POST")
    until(lambda: ask(f"hub/api/users/{me}")["servers"][""]["ready"], 400)  # a KeyError: it did not start
    print(json.dumps(jobs()), flush=True)
    lessons = until(lambda: ask(f"user/{me}/api/contents/notebooks"))
    print(json.dumps(sorted(each["name"] for each in lessons["content"])), flush=True)
    ask(f"hub/api/users/{me}/server", "DELETE")
    print(json.dumps(until(lambda: [state for state in jobs()[:1] if state == "CANCELLED"])), flush=True)


if __name__ == "__main__":
    program = Path(sys.executable).with_name("jupyterhub")
    hub = subprocess.Popen([program, "-f", sys.argv[1]], stdout=sys.stderr)
    try:
        main(getpass.getuser())
    finally:
        hub.send_signal(signal.SIGINT)
        try:
            hub.wait(60)
        except subprocess.TimeoutExpired:
            hub.kill()
