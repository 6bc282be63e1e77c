"""The watchman: a process of its own that outlives the kernel just long enough to clean up after it.

Engines live in sessions of their own, so no signal to a process group reaches them all, and a kernel that is killed
with SIGKILL cannot clean up anything. So every process of a cluster carries a marker in its environment, and this
file, run as a script by the kernel, waits at the other end of a pipe:

    python -I -S guard.py CLUSTER_ID FOLDER < pipe

When the pipe closes or the kernel is gone, the Slurm job or step that FOLDER names is cancelled, everything that
carries the marker is killed and the folder is removed. As long as it lives it touches FOLDER/alive beside a job's
number: a job ends itself when nobody has done so for ten minutes, as when the login node has gone down, or when the
folder is gone.
Standard library only: it starts in 10 ms and takes 10 MB.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import time

MARKER = "AISCALE_CLUSTER"
_PAUSE_S = 0.05
_ALIVE_S = 60  #: between two signs of life; engines.sbatch waits for ten times as long
_ANSWER_S = 10  #: of one scancel
_PATIENCE_S = 600  #: with a Slurm that does not answer, before a job is left to find out by itself


def marked(cluster_id: str) -> list[int]:
    """The processes of this user whose environment says that they belong to the cluster, zombies left out."""
    needle = f"{MARKER}={cluster_id}"
    if not os.path.isdir("/proc/self"):  # macOS: ps shows the environment of one's own processes
        listing = subprocess.run(["ps", "-Ewwax", "-o", "pid=,command="], capture_output=True, text=True).stdout
        found = [int(line.split(None, 1)[0]) for line in listing.splitlines() if needle in line]
    else:
        found = [int(name) for name in os.listdir("/proc") if name.isdigit() and _carries(name, needle.encode())]
    return [pid for pid in found if pid != os.getpid()]


def _carries(pid: str, needle: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            return needle in environ.read().split(b"\0")
    except OSError:  # gone, or somebody else's
        return False


def kill_marked(cluster_id: str, timeout_s: float = 5.0) -> bool:
    """Kill until none is left; True when that succeeded. Repeated, because a process may fork while it is killed."""
    deadline = time.monotonic() + timeout_s
    while pids := marked(cluster_id):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
    return True


def cancel(folder: str, *names: str, patience_s: float = 0) -> bool:
    """Cancel the Slurm job that the file FOLDER/job names, or the step in FOLDER/step; False if there is neither, or
    Slurm does not answer."""
    for name in names or ("job", "step"):
        try:
            with open(os.path.join(folder, name)) as file:
                return _scancel(file.read(), time.monotonic() + patience_s)
        except OSError:
            continue
    return False


def _scancel(number: str, deadline: float) -> bool:
    while True:
        try:
            done = subprocess.run(
                ["scancel", number], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=_ANSWER_S
            )
            if done.returncode == 0 or "Invalid job id" in done.stderr:
                return True
        except subprocess.TimeoutExpired:
            pass
        if time.monotonic() >= deadline:
            return False
        time.sleep(5)


def _show_life(folder: str) -> None:
    try:
        open(os.path.join(folder, "alive"), "w").close()
    except OSError:  # a disk that is full or away for a moment
        pass


def main() -> None:
    cluster_id, folder = sys.argv[1:]
    for harmless in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(harmless, signal.SIG_IGN)
    kernel, shown = os.getppid(), float("-inf")
    # A child that the kernel forked may hold the pipe open, so look at the kernel itself as well.
    while os.getppid() == kernel:
        ready, _, _ = select.select([0], [], [], 0.5)
        if ready and not os.read(0, 64):
            break
        if time.monotonic() - shown >= _ALIVE_S and os.path.exists(os.path.join(folder, "job")):
            _show_life(folder)
            shown = time.monotonic()
    cancel(folder, patience_s=_PATIENCE_S)
    kill_marked(cluster_id)
    time.sleep(_PAUSE_S)  # one that was between fork and exec a moment ago shows its marker now
    kill_marked(cluster_id)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
