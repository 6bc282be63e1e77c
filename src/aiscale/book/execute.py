"""One notebook in a process of its own: `python -m aiscale.book.execute JOB.json`, started by `aiscale.book.running`.

Papermill runs the notebook here. Each cell that starts, and that the kernel is about to end, is reported as a line of
JSON in the file that the job names; the process that reads it decides about time-outs, because it can still act when
everything here hangs.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import warnings
from pathlib import Path

_PR_SET_PDEATHSIG = 1
#: nbclient's own time-out is a second line of defence behind that of the process that watches.
_GRACE_S = 30.0
#: From a cell's answer until the kernel has said that it is idle: its own four seconds are few on a busy machine.
_IDLE_S = 60


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    # Whoever is meant to end this process may itself be killed.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != job["parent"]:
        return 1
    with open(job["events"], "w", buffering=1) as events:
        return _execute(job, lambda **event: events.write(json.dumps(event) + "\n"))


def _execute(job: dict, report) -> int:
    import papermill
    from papermill.engines import papermill_engines

    _let_tagged_cells_fail()
    papermill_engines.register("aiscale", _engine(report))
    warnings.filterwarnings("ignore", module="papermill|nbformat|nbclient|traitlets")
    try:
        papermill.execute_notebook(
            job["source"],
            job["target"],
            job["parameters"],
            engine_name="aiscale",
            kernel_name="python3",
            language="python",
            cwd=job["cwd"],
            progress_bar=False,
            start_timeout=job["start_timeout_s"],
            execution_timeout=int(job["cell_timeout_s"] + _GRACE_S),
            iopub_timeout=_IDLE_S,
            kernel_manager_class=_manager(report),
            config=_sockets(job["sockets"]),
        )
    except Exception as error:
        report(event="error", kind=type(error).__name__, message=str(error))
        return 1
    report(event="done")
    return 0


def _engine(report):
    from papermill.engines import NBClientEngine

    class Engine(NBClientEngine):
        """Papermill's own, which also says where it is."""

        @classmethod
        def execute_managed_notebook(cls, nb_man, kernel_name, **options):
            start = nb_man.cell_start

            def cell_start(cell, cell_index=None, **more):
                if cell.cell_type == "code":
                    report(event="cell", id=cell.get("id"), injected="injected-parameters" in cell.metadata.tags)
                return start(cell, cell_index, **more)

            nb_man.cell_start = cell_start
            return super().execute_managed_notebook(nb_man, kernel_name, **options)

    return Engine


def _manager(report):
    from jupyter_client import AsyncKernelManager

    class Manager(AsyncKernelManager):
        """Jupyter's own, which also says that it ends the kernel: to whoever watches, this would look like a death."""

        async def shutdown_kernel(self, now: bool = False, restart: bool = False) -> None:
            report(event="shutdown")
            await super().shutdown_kernel(now=now, restart=restart)

    return Manager


def _sockets(name: str):
    """Have the kernel listen on files `name`-1 to -5. Of ports that are free when they are chosen, one may be somebody
    else's when the kernel takes it, seconds later; they serve where a file cannot, because its name is too long, say.
    """
    from traitlets.config import Config

    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(f"{name}-0")
    except (AttributeError, OSError):
        return Config()
    return Config({"KernelManager": {"transport": "ipc", "ip": name}})


def _let_tagged_cells_fail() -> None:
    """Papermill fails a notebook for any error in it, also for one that a cell makes on purpose."""
    from papermill import execute

    complain = execute.raise_for_execution_errors

    def complain_of_untagged(nb, output_path) -> None:
        if any(_failed(cell) and "raises-exception" not in cell.metadata.get("tags", []) for cell in nb.cells):
            complain(nb, output_path)

    execute.raise_for_execution_errors = complain_of_untagged


def _failed(cell) -> bool:
    """Whether a cell raised; papermill's mark is there even where no output tells of it."""
    raised = any(output.output_type == "error" for output in cell.get("outputs", []))
    return raised or cell.metadata.get("papermill", {}).get("exception") is True


if __name__ == "__main__":
    raise SystemExit(main())
