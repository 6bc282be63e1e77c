"""Why a notebook failed, from what its executed copy shows: the cell, its number, and the failing rank's traceback."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from nbformat import NotebookNode

from aiscale.book.notebook import BookError, Notebook, read, tags
from aiscale.book.results import Failure

_COLOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LONGEST_LINES = 80
#: What ipyparallel raises after it has shown the ranks' errors: true, and of no help.
_EMPTY_ERRORS = ("AlreadyDisplayedError", "CompositeError")


def explain(notebook: Notebook, executed: Path, current: str, ending: str, event: dict, log: Path) -> Failure:
    """Why it failed. `current` is the id of the last cell that started, `ending` why it was ended from outside,
    `event` the last word of the process that executed it, `log` what that process wrote."""
    cell = _failing_cell(executed, current)
    errors = [output for output in cell.outputs if output.output_type == "error"] if cell else []
    error = next((e for e in errors if e.ename not in _EMPTY_ERRORS), None)
    shown = _shown(cell) if cell else ""
    if ending:
        message = ending
    elif event.get("kind") == "DeadKernelError":
        message = "the kernel died"
    elif error is not None:
        message = f"{error.ename}: {error.evalue}"
    elif errors:
        message = _last_line(shown) or errors[0].ename
    elif event.get("event") == "error":
        message = f"{event['kind']}: {event['message']}"
    else:
        message = "the process that ran it died"
    if not shown and log.exists():
        shown = _tail(log.read_text(errors="replace"))
    number, source = _in_source(notebook, cell.id if cell else current)
    return Failure(message.strip().splitlines()[0], number, source, shown)


def _failing_cell(executed: Path, current: str) -> NotebookNode | None:
    """The first cell that failed without being meant to, else the one that ran last."""
    try:
        cells = [cell for cell in read(executed).cells if cell.cell_type == "code"]
    except BookError:  # killed before, or while, it was written
        return None
    for cell in cells:
        failed = any(output.output_type == "error" for output in cell.outputs)
        if failed and "raises-exception" not in tags(cell):
            return cell
    return next((cell for cell in cells if cell.get("id") == current), None)


def _in_source(notebook: Notebook, cell_id: str) -> tuple[int | None, str]:
    """Number, counted from 1, and text of a cell of the source: papermill may have inserted others."""
    for number, cell in enumerate(notebook.content.cells, 1):
        if cell.get("id") == cell_id:
            return number, cell.source
    return None, ""


def _shown(cell: NotebookNode) -> str:
    """Everything the cell showed: a rank's error may have come as text, as display data or as the error itself."""
    parts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            parts.append(output.text)
        elif output.output_type == "error" and output.ename not in _EMPTY_ERRORS:
            parts.append("\n".join(output.traceback) or f"{output.ename}: {output.evalue}")
        elif "text/plain" in output.get("data", {}):
            parts.append(output.data["text/plain"])
    return _tail("\n".join(_COLOR.sub("", part).rstrip() for part in parts))


def _tail(text: str) -> str:
    lines = text.rstrip().splitlines()
    return "\n".join(lines if len(lines) <= _LONGEST_LINES else ["...", *lines[-_LONGEST_LINES:]])


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def describe(name: str, failure: Failure) -> Sequence[str]:
    """The failure as lines for a person: cell, its text with numbered lines, what it showed, and the message last."""
    where = f"cell {failure.cell}" if failure.cell else "outside of its cells"
    lines = [f"{name}, {where}:"]
    lines += [f"{number:6d} | {text}" for number, text in enumerate(failure.source.splitlines(), 1)]
    if failure.traceback:
        lines += ["", failure.traceback]
    return [*lines, "", f"{name}, {where}: {failure.message}"]
