"""The cleaner: no process of a cluster outlives its kernel, not even after kill -9.

    python -I -S guard.py CLUSTER_ID FOLDER < pipe

When the pipe, whose other end the kernel holds, closes or the kernel is gone, this cancels the
Slurm job or step named in FOLDER, kills all processes that inherited the cluster's marker, and
removes the folder.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys

MARKER = "AISCALE_CLUSTER"
_ANSWER_S = 30  #: timeout of scancel


def cancel(folder: str) -> None:
    """Cancel the Slurm job in the file FOLDER/job, or else the step in FOLDER/step.

    If Slurm does not answer, the job ends itself when the folder is gone.
    """
    for name in ("job", "step"):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired), open(path) as file:
                quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                subprocess.run(["scancel", file.read()], timeout=_ANSWER_S, **quiet)
            return


def main() -> None:
    """Wait for the kernel to end, then clean up."""
    cluster_id, folder = sys.argv[1:]
    for harmless in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(harmless, signal.SIG_IGN)
    # Last: it may be site-packages.
    sys.path.append(os.path.abspath(os.path.join(__file__, *[".."] * 4)))
    from aiscale.processes import kill_marked

    kernel = os.getppid()
    # A child that the kernel forked may hold the pipe open, so check the kernel itself as well.
    while os.getppid() == kernel:
        ready, _, _ = select.select([0], [], [], 0.5)
        if ready and not os.read(0, 64):
            break
    cancel(folder)
    kill_marked(MARKER, cluster_id)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
