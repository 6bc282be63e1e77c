"""What became of each notebook: kept in build/notebooks/results.json, beside the executed copies.

    {"notebooks": {"03_ddp": {"state": "passed", "seconds": 41.2, "cells": 23, "parameters": {}, "key": "...", ...}}}

A run of some notebooks replaces their entries and leaves the others as they are. `key` is a hash of everything that
decides the result (the notebook, the package, parameters, versions), so that --resume knows what is still true.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import aiscale
from aiscale.book.notebook import Notebook

State = Literal["passed", "failed", "interrupted"]


@dataclass(frozen=True)
class Failure:
    """Why a notebook failed."""

    message: str  #: one line: the error, or which time-out passed
    cell: int | None  #: of the source notebook, counted from 1; None: outside of any cell
    source: str  #: the failing cell
    traceback: str  #: what the cell showed, of the failing ranks too, without colours


@dataclass(frozen=True)
class Result:
    """One notebook, executed."""

    name: str
    state: State
    seconds: float
    cells: int  #: code cells of the source
    parameters: dict = field(default_factory=dict)  #: those that were given
    failure: Failure | None = None
    executed: str = ""  #: the executed copy; also of a failed notebook, up to where it came
    left_behind: int = 0  #: processes that the notebook left behind, and that were ended
    key: str = ""

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(tree: Mapping) -> Result:
        failure = Failure(**tree["failure"]) if tree.get("failure") else None
        return Result(**{**tree, "failure": failure})


class Ledger:
    """results.json of one folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "results.json"

    def load(self) -> dict[str, Result]:
        """The results by notebook; none where the file is missing or was written by another version."""
        try:
            tree = json.loads(self.path.read_text())
            return {name: Result.from_dict(entry) for name, entry in tree["notebooks"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def record(self, result: Result) -> None:
        self._change(result.name, result)

    def forget(self, name: str) -> None:
        """A notebook that starts has no result until it ends."""
        self._change(name, None)

    def _change(self, name: str, result: Result | None) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several notebooks may run at once, each from its own terminal
            entries = {**self.load(), name: result}
            tree = {n: entry.to_dict() for n, entry in sorted(entries.items()) if entry}
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps({"notebooks": tree}, indent=1) + "\n")
            partial.replace(self.path)


def content_key(notebook: Notebook, parameters: Mapping[str, object]) -> str:
    """A hash of all that decides the notebook's result."""
    parts = (notebook.path.read_bytes(), json.dumps(parameters, sort_keys=True, default=str).encode(), _surroundings())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


@cache
def _surroundings() -> bytes:
    digest = hashlib.sha256(f"{sys.version} torch {_version('torch')}".encode())
    package = Path(aiscale.__file__).parent
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.digest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
