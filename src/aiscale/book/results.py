"""How notebooks ran, in OUT/notebooks/results.json, beside their executed copies.

load_results(Path("build/notebooks"))["03_ddp"].state    # -> "passed"

{"notebooks": {"03_ddp": {"state": "passed", "seconds": 41.2, "cells": 23, "parameters": {}, "key": "...", ...}}}
"""

from __future__ import annotations

import fcntl
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from aiscale.config import write_whole


@dataclass(frozen=True)
class Failure:
    message: str  #: one line: the error, or which time-out was exceeded
    cell: int | None  #: of the source notebook, counted from 1; None: outside all cells
    source: str  #: the failing cell
    traceback: str  #: the cell's output, tracebacks of failing ranks included, without colours


@dataclass(frozen=True)
class Result:
    name: str
    state: Literal["passed", "failed", "interrupted"]
    seconds: float
    cells: int  #: code cells of the source that were to run
    parameters: dict = field(default_factory=dict)  #: as given by the caller
    failure: Failure | None = None
    executed: str = ""  #: path of the executed copy; also of a failed notebook, up to the failure
    left_behind: int = 0  #: processes of the notebook that had to be killed
    core: bool = False  #: optional cells were left out
    until: str = ""  #: the section before which the run stopped
    key: str = ""  #: a hash of everything that determines the result

    def describe(self) -> str:
        """The failure for a person: cell, its text with numbered lines, its output, and the message last."""
        if not self.failure:
            return f"{self.name}: {self.state}"
        where = f"cell {self.failure.cell}" if self.failure.cell else "outside of its cells"
        lines = [f"{number:6d} | {text}" for number, text in enumerate(self.failure.source.splitlines(), 1)]
        shown = ["", self.failure.traceback] if self.failure.traceback else []
        lines = [f"{self.name}, {where}:", *lines, *shown, "", f"{self.name}, {where}: {self.failure.message}"]
        return "\n".join(lines)


def load_results(folder: Path) -> dict[str, Result]:
    """The results by notebook; empty if the file is missing or was written by another version."""
    try:
        tree = json.loads((folder / "results.json").read_text())["notebooks"]
        failures = {name: entry["failure"] and Failure(**entry["failure"]) for name, entry in tree.items()}
        return {name: Result(**{**entry, "failure": failures[name]}) for name, entry in tree.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def save_result(folder: Path, name: str, result: Result | None) -> None:
    """Replace the result of one notebook (None removes it), leaving the others."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several notebooks may run at once, each from its own terminal
        entries = {**load_results(folder), name: result}
        tree = {name: asdict(entry) for name, entry in sorted(entries.items()) if entry}
        write_whole(path, json.dumps({"notebooks": tree}, indent=1) + "\n")
