"""The journal of a soak, so that an interrupted one can resume: one line per round and damage in journal.jsonl.

It starts over if the last soak was complete, had other arguments, or ran other code.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import aiscale
from soak.plan import SoakError


@dataclass
class Journal:
    """The entries of one soak, by (kind, number); kind is "round" or "damage"."""

    folder: Path
    file: TextIO  #: locked while this lives
    entries: dict[tuple[str, int], dict] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, about: Mapping, wanted: Mapping[str, list[int]], *, fresh: bool = False) -> Journal:
        """Resume in `folder`, or start over there."""
        path, head = folder / "journal.jsonl", {**about, "code": _fingerprint()}
        if not path.exists() and folder.exists() and any(folder.iterdir()):
            raise SoakError(f"{folder} has files, but none of a soak: name another folder by --dir")
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SoakError(
                f"{folder} is in use by another soak: wait for it, or name another folder by --dir"
            ) from None
        file.seek(0)
        lines = _whole_lines(file.read())
        entries = {(line["what"], line["number"]): line for line in lines[1:]}
        missing = {(what, number) for what, numbers in wanted.items() for number in numbers} - set(entries)
        if fresh or lines[:1] != [head] or not missing:
            lines, entries = [head], {}
            _empty(folder, but=path)
        file.truncate(0)  # drops an incomplete last line, too
        file.write("".join(json.dumps(line) + "\n" for line in lines))
        file.flush()
        return cls(folder, file, entries)

    def add(self, what: str, number: int, **entry) -> None:
        self.entries[what, number] = entry = {"what": what, "number": number, **entry}
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()


def _empty(folder: Path, *, but: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path != but:
            path.unlink()


def _whole_lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _fingerprint() -> str:
    """A hash of aiscale's code."""
    total = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(aiscale.__file__).parent.rglob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()
