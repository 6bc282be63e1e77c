"""Runs one notebook in a new process: `python -m aiscale.book.execute JOB.json`, started by `aiscale.book.running`.

- a cell that hangs is interrupted at its time-out, so that its traceback shows where it hung
- what cannot be interrupted is killed a little later by the operating system's alarm, even if all of Python hangs
- a dead kernel fails the notebook at once: nbclient checks every second
- this process ends when its parent ends, whatever the signal

Papermill sets the parameters, runs the cells and writes the executed copy after each. The start of each cell is
reported as a line of JSON on standard output.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from aiscale.processes import die_with

#: From a cell's reply until the kernel reports idle: nbclient's default of four seconds is short on a busy machine.
_IDLE_S = 60
_LONGEST_SOCKET = 100  #: characters in a socket's file name; Linux allows 107, macOS 103
SKIPPED = "not-run"  #: the tag of cells in the executed copy that the run left out
_LONGEST_MESSAGE = 2000  #: so that a report is written in one piece or not at all


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    die_with(job["parent"])
    # A copy that the kernel does not inherit: what kernel and libraries print goes to standard error.
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def report(**event: object) -> None:
        events.write(json.dumps(event) + "\n")

    try:
        return 0 if _execute(job, report) else 1
    except Exception as error:
        message = {"DeadKernelError": "the kernel died", "TimeoutError": str(error)}.get(type(error).__name__)
        report(error=message or f"{type(error).__name__}: {error}"[:_LONGEST_MESSAGE])
        return 1


def _execute(job: dict, report: Callable) -> bool:
    """Whether all cells passed, except those tagged to fail; raises errors from outside the cells."""
    timer = _Timer(job, report)

    from papermill.engines import papermill_engines
    from papermill.iorw import load_notebook_node
    from papermill.parameterize import parameterize_notebook

    notebook = load_notebook_node(job["source"])
    for index in job["skipped"]:
        if notebook.cells[index].cell_type == "code":
            notebook.cells[index].metadata.setdefault("tags", []).append(SKIPPED)
    if job["parameters"]:
        notebook = parameterize_notebook(notebook, job["parameters"], kernel_name="python3", language="python")
    done = papermill_engines.execute_notebook_with_engine(
        None,
        notebook,
        kernel_name="python3",
        output_path=job["target"],
        progress_bar=False,
        start_timeout=job["start_timeout_s"],
        iopub_timeout=_IDLE_S,
        timeout_func=timer.left_s,
        interrupt_on_timeout=True,
        on_cell_execute=timer.cell_starts,
        on_cell_executed=timer.cell_ended,
        config=_sockets(job["sockets"]),
        skip_cells_with_tag=SKIPPED,
    )
    return not done.metadata.papermill.exception


class _Timer:
    """The time-outs of a cell and of the notebook: for nbclient, and as an alarm that nothing in this process can
    block."""

    def __init__(self, job: dict, report: Callable) -> None:
        self.job, self.report = job, report
        self.end = time.monotonic() + job["timeout_s"]
        self._set(job["timeout_s"], "notebook")

    def _set(self, seconds: float, what: str, cell: str = "") -> None:
        allowed_s = self.job["cell_timeout_s" if what == "cell" else "timeout_s"]
        self.late = f"the {what} took longer than {allowed_s:g} s"
        self.ends_at = time.monotonic() + seconds
        self.report(cell=cell, late=self.late)
        signal.setitimer(signal.ITIMER_REAL, max(0.01, seconds + self.job["interrupt_s"]))  # SIGALRM kills by default

    def cell_starts(self, cell, cell_index: int) -> None:
        left_s, cell_timeout_s = self.end - time.monotonic(), self.job["cell_timeout_s"]
        self._set(min(left_s, cell_timeout_s), "cell" if cell_timeout_s < left_s else "notebook", cell.id)

    def left_s(self, cell) -> float:
        """Seconds until nbclient interrupts the running cell."""
        return max(0.01, self.ends_at - time.monotonic())  # for nbclient, 0 means no limit

    def cell_ended(self, cell, cell_index: int, execute_reply: dict) -> None:
        if time.monotonic() > self.ends_at:  # it was interrupted, even if it caught that
            raise TimeoutError(self.late)
        self._set(self.end - time.monotonic(), "notebook")


def _sockets(name: str):
    """Let the kernel listen on files `name`-1 to -5, unless the names are too long. A port that is free when chosen
    may be taken when the kernel binds it, seconds later."""
    from traitlets.config import Config

    fits = len(os.fsencode(name)) + len("-5") <= _LONGEST_SOCKET
    return Config({"KernelManager": {"transport": "ipc", "ip": name}} if fits else {})


if __name__ == "__main__":
    raise SystemExit(main())
