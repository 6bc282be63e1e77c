"""Process 1 of a rehearsal: starts its network and daemons, and ends them when its owner ends.

    unshare --net --mount --uts --pid --fork --kill-child --mount-proc python init.py FOLDER

FOLDER/plan.json says what to start. One line on standard output answers: empty, or why it could not
start. When standard input closes, because the owner closed it or was killed, everything here is
killed and the folder removed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

START_LIMIT_S = 180


class Failed(Exception):
    """A step of the start failed; the message is one line."""


def main() -> int:
    folder = Path(sys.argv[1])
    plan = json.loads((folder / "plan.json").read_text())
    try:
        start(folder, plan)
        print(flush=True)
        signal.signal(signal.SIGCHLD, _reap)
        sys.stdin.read()
    except Failed as error:
        print(error, flush=True)
    except BrokenPipeError:  # the owner has ended
        pass
    finally:
        end(folder)
    return 0


def start(folder: Path, plan: dict) -> None:
    os.environ["SLURM_CONF"] = str(folder / "etc/slurm.conf")
    do("mount", "-t", "tmpfs", "none", "/run")
    os.mkdir("/run/netns")
    do("hostname", "login")
    for name in ("hosts", "nsswitch.conf"):
        do("mount", "--bind", str(folder / "etc" / name), f"/etc/{name}")
    if plan["nvme"]:
        _make_room(Path(plan["nvme"]))
    _start_network(plan["names"], plan["addresses"], plan["login"])
    _start_daemons(folder, plan)


def _make_room(path: Path) -> None:
    """An empty folder `path`, even if we may not create one.
    For that, mount a tmpfs over its parent, and bind its folders back."""
    above = path.parent
    had = [(entry.name, os.open(entry, os.O_PATH)) for entry in above.iterdir() if entry.is_dir()]
    do("mount", "-t", "tmpfs", "none", str(above))
    for name, handle in had:
        (above / name).mkdir()
        do(
            "mount",
            "-c",
            "--rbind",
            f"/proc/self/fd/{handle}",
            str(above / name),
            pass_fds=[handle],
        )
        os.close(handle)
    path.mkdir(exist_ok=True)


def _start_network(names: list[str], addresses: list[str], login: str) -> None:
    """A bridge, and a network namespace for each node behind it."""
    here = [
        "link set lo up",
        "link add rehearsal type bridge",
        f"addr add {login}/24 dev rehearsal",
    ]
    here += ["link set rehearsal up", *(f"netns add {name}" for name in names)]
    for i, name in enumerate(names, 1):
        here += [
            f"link add node{i} type veth peer name eth0 netns {name}",
            f"link set node{i} master rehearsal up",
        ]
    do("ip", "-batch", "-", input="\n".join(here))
    for name, address in zip(names, addresses, strict=True):
        inside = [f"addr add {address}/24 dev eth0", "link set lo up", "link set eth0 up"]
        do(
            "ip",
            "-n",
            name,
            "-batch",
            "-",
            input="\n".join([*inside, f"route add default via {login}"]),
        )


def _start_daemons(folder: Path, plan: dict) -> None:
    munge = folder / "munge"
    key = munge / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = [
        "--key-file",
        key,
        "--log-file",
        munge / "log",
        "--pid-file",
        munge / "pid",
        "--seed-file",
        munge / "seed",
    ]
    do("munged", "--force", "--socket", munge / "munge.sock", *files)
    do("slurmctld", "-i")
    # slurmd daemonizes, so each call ends at once; in parallel they take half the time
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(_start_node, name, folder, plan) for name in plan["names"]]:
            done.result()
    _await_idle(folder, len(plan["names"]))


def _start_node(name: str, folder: Path, plan: dict) -> None:
    script = Path(__file__).parent / "templates" / "node.sh"
    node = [
        "nsenter",
        f"--net=/run/netns/{name}",
        "unshare",
        "--mount",
        "--uts",
        "--propagation=private",
    ]
    do(*node, "bash", script, name, folder, plan["nvme"], *plan["share"])


def _await_idle(folder: Path, nodes: int) -> None:
    end_at = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end_at:
        state = _states()
        if len({line for line in state.splitlines() if line.endswith(" idle")}) == nodes:
            return
        for log in (folder / "log").glob("*.log"):
            if fatal := [
                line for line in log.read_text(errors="replace").splitlines() if "fatal:" in line
            ]:
                raise Failed(f"{log.stem}: {fatal[0].partition('fatal:')[2].strip()}")
        time.sleep(0.02)
    raise Failed(
        f"after {START_LIMIT_S} s the virtual nodes were not idle: "
        f"{' '.join(state.split()) or 'no answer'}"
    )


def _states() -> str:
    try:  # sinfo waits a minute for a slurmctld that has ended
        return subprocess.run(
            ["sinfo", "-haN", "-o", "%N %t"], capture_output=True, text=True, timeout=10
        ).stdout
    except subprocess.TimeoutExpired:
        return ""


def end(folder: Path) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # all of this pid namespace
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    shutil.rmtree(folder, ignore_errors=True)


def do(*command: object, **options) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, **options)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"]
        raise Failed(f"{' '.join(words[:6])}: {lines[-1]}")


def _reap(*_: object) -> None:
    """Orphans of jobs become children of process 1, which must reap them."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    sys.exit(main())
