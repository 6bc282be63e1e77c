"""The cleaner: no process of a cluster outlives its kernel, not even after kill -9.

    python -I -S guard.py CLUSTER_ID FOLDER < pipe

The kernel runs this file as a script and holds the other end of the pipe, since a kernel killed with SIGKILL cannot
clean up. Every process of a cluster inherits a marker in its environment, because engines live in several sessions and
no signal to a process group reaches them all. When the pipe closes or the kernel is gone, the cleaner cancels the Slurm
job or step named in FOLDER, kills all processes with the marker, and removes the folder. While it runs it touches
FOLDER/alive: a job ends itself if that is ten minutes old, for example because the login node went down, or if the
folder is gone. Standard library only: it starts in 10 ms and takes 10 MB.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time

MARKER = "AISCALE_CLUSTER"
_ALIVE_S = 60  #: between two touches; engines.sbatch waits ten times as long
_ANSWER_S = 10  #: timeout of one scancel
_PATIENCE_S = 600  #: if Slurm does not answer, before the job is left to end itself


def cancel(folder: str, *names: str, patience_s: float = 0) -> bool:
    """Cancel the Slurm job in the file FOLDER/job, or the step in FOLDER/step; False if there is neither, or if Slurm
    does not answer."""
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


def main() -> None:
    """Wait for the kernel to end, then clean up."""
    cluster_id, folder = sys.argv[1:]
    for harmless in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(harmless, signal.SIG_IGN)
    sys.path.append(os.path.abspath(os.path.join(__file__, *[".."] * 3)))  # last: it may be site-packages
    from aiscale.processes import kill_marked

    kernel, shown = os.getppid(), float("-inf")
    # A child that the kernel forked may hold the pipe open, so check the kernel itself as well.
    while os.getppid() == kernel:
        ready, _, _ = select.select([0], [], [], 0.5)
        if ready and not os.read(0, 64):
            break
        if time.monotonic() - shown >= _ALIVE_S and os.path.exists(os.path.join(folder, "job")):
            with contextlib.suppress(OSError):  # the disk is full or unavailable for a moment
                open(os.path.join(folder, "alive"), "w").close()
            shown = time.monotonic()
    cancel(folder, patience_s=_PATIENCE_S)
    kill_marked(MARKER, cluster_id)
    time.sleep(0.05)  # a process that was between fork and exec shows its marker now
    kill_marked(MARKER, cluster_id)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
