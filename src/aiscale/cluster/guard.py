"""Promise: nothing of a cluster outlives its kernel, not even after kill -9.

Engines live in other sessions, so no signal to a process group reaches them all, and a kernel that is killed with
SIGKILL cannot clean up. So every process of a cluster inherits a marker in its environment, and this file, run as a
script by the kernel, waits at the other end of a pipe:

    python -I -S guard.py CLUSTER_ID FOLDER < pipe

When the pipe closes or the kernel is gone, it cancels the Slurm job or step that FOLDER names, kills everything that
carries the marker, and removes the folder. As long as it lives it touches FOLDER/alive beside a job's number: a job
ends itself when nobody has done so for ten minutes, as when the login node has gone down, or when the folder is gone.
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
_ALIVE_S = 60  #: between two signs of life; engines.sbatch waits for ten times as long
_ANSWER_S = 10  #: of one scancel
_PATIENCE_S = 600  #: with a Slurm that does not answer, before a job is left to find out by itself


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
    """Wait for the kernel to end, then clean up after it."""
    cluster_id, folder = sys.argv[1:]
    for harmless in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(harmless, signal.SIG_IGN)
    sys.path.append(os.path.abspath(os.path.join(__file__, *[".."] * 3)))  # last: it may be site-packages
    from aiscale.processes import kill_marked

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
    kill_marked(MARKER, cluster_id)
    time.sleep(0.05)  # one that was between fork and exec a moment ago shows its marker now
    kill_marked(MARKER, cluster_id)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
