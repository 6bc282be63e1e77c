"""Replicas that a lesson kills: a job of workshop/your_own/keep_going.py, and what it says.

    with Replicas("../my", "--steps=60") as job:
        job.until(r"step 20 ")
        job.kill("r1")
        job.wait()
    job.said    # [(seconds since the start, "r0", "step 0 loss 5.733018"), ...]

When the block ends, all its processes have ended.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

_SAID = re.compile(r"(?P<s>[\d.]+) (?P<name>r\d+) (?P<text>.*)")


class Replicas:
    """A job of `replicas` processes of `script`, started in `folder`."""

    def __init__(
        self, folder: str | Path, *options: str, replicas: int = 3, script: str = "train_elastic.py"
    ):
        self.said: list[tuple[float, str, str]] = []
        self._pids: dict[str, int] = {}
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors = tempfile.TemporaryFile("w+")
        self._room = tempfile.TemporaryDirectory()
        #: in which the replicas agree
        self.meet = Path(self._room.name, "meet")
        command = [f"--replicas={replicas}", f"--meet={self.meet}", script, *options]
        self._job = subprocess.Popen(
            [sys.executable, "keep_going.py", *command],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._job.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *_) -> None:
        self._job.terminate()
        self._job.wait()  # it kills its replicas first
        self._reader.join()
        self._job.stdout.close()
        self._errors.close()
        self._room.cleanup()

    def until(self, pattern: str, limit_s: float = 120) -> re.Match:
        """Follow the job until a line matches, such as r"step 20 "; the match.

        Raises RuntimeError, with the last line of its errors, if the job ends before or if the
        limit is over.
        """
        until = time.monotonic() + limit_s
        while True:
            line = self._next(until)
            if line is None:
                raise RuntimeError(f"the job ended before {pattern!r}: {self._error()}")
            if found := re.search(pattern, line):
                return found

    def wait(self, limit_s: float = 120) -> None:
        """Follow the job to its end. Raises RuntimeError if it fails, or if the limit is over."""
        until = time.monotonic() + limit_s
        while self._next(until) is not None:
            pass
        if self._job.wait():
            raise RuntimeError(self._error())

    def _next(self, until: float) -> str | None:
        """The job's next line; None when it has ended."""
        try:
            line = self._lines.get(timeout=max(0, until - time.monotonic()))
        except queue.Empty:
            last = self.said[-1] if self.said else "nothing"
            raise RuntimeError(f"the job still runs; the last that it said is {last}") from None
        if line and (found := _SAID.match(line)):
            self.said.append((float(found["s"]), found["name"], found["text"]))
            if pid := re.fullmatch(r"pid (\d+)", found["text"]):
                self._pids[found["name"]] = int(pid[1])
        return line

    def _error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().split("\n")
        told = [line for line in lines if re.match(r"\w*(Error|Exception|Exit)\b.*|r\d ", line)]
        return told[0] if told else "it says nothing"

    def kill(self, name: str) -> None:
        """As `kill -9` does: the replica cannot save, nor tell its peers."""
        os.kill(self._pids[name], signal.SIGKILL)

    def pause(self, *names: str) -> None:
        """They stand still, and keep their connections."""
        for name in names:
            os.kill(self._pids[name], signal.SIGSTOP)

    def go_on(self, *names: str) -> None:
        """After `pause`."""
        for name in names:
            os.kill(self._pids[name], signal.SIGCONT)

    def until_at_the_door(self, name: str, limit_s: float = 120) -> None:
        """Wait until this replica asks to be let in. Raises RuntimeError if the limit is over."""
        until = time.monotonic() + limit_s
        while not Path(self.meet, f"door-{name}-{self._pids[name]}").exists():
            if time.monotonic() > until:
                raise RuntimeError(f"{name} has not come to the door in {limit_s:.0f} s")
            time.sleep(0.02)

    def pids(self) -> list[int]:
        """Of the replicas that were started last."""
        return list(self._pids.values())

    def steps(self) -> list[tuple[float, int, float, int]]:
        """(seconds since the start, step, loss, members) of each step that was taken, in order."""
        found, members = [], 0
        for seconds, _, text in self.said:
            if round := re.match(r"round \d+ members (\d+)", text):
                members = int(round[1])
            elif step := re.match(r"step (\d+) loss (\S+)", text):
                found.append((seconds, int(step[1]), float(step[2]), members))
        return found

    def states(self) -> dict[str, str]:
        """At the end: a hash of each replica's weights and moments."""
        return {
            name: text.removeprefix("state ")
            for _, name, text in self.said
            if text.startswith("state ")
        }
