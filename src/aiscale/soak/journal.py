"""What a soak has done so far, so that an interrupted one goes on: a line for each round and damage in journal.jsonl.

It starts anew where the last one was done, was asked for something else, or was of other code than today's.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiscale
from aiscale.soak.plan import SoakError


@dataclass
class Journal:
    """The entries of one soak, by what they are of ("round" or "damage") and its number."""

    folder: Path
    entries: dict[tuple[str, int], dict] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, about: Mapping, wanted: Mapping[str, list[int]], *, fresh: bool = False) -> Journal:
        """Go on in `folder`, or start anew there."""
        path, head = folder / "journal.jsonl", {**about, "code": _fingerprint()}
        if not path.exists() and folder.exists() and any(folder.iterdir()):
            raise SoakError(f"{folder} has files, but none of a soak: name another folder by --dir")
        lines = _lines(path) if path.exists() and not fresh else []
        entries = {(line["what"], line["number"]): line for line in lines[1:]}
        missing = [(what, number) for what, numbers in wanted.items() for number in numbers]
        missing = [key for key in missing if key not in entries]
        if lines and lines[0] == head and missing:
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))  # without half a line
            return cls(folder, entries)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        path.write_text(json.dumps(head) + "\n")
        return cls(folder)

    def add(self, what: str, number: int, **entry) -> None:
        self.entries[what, number] = entry = {"what": what, "number": number, **entry}
        with (self.folder / "journal.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _lines(path: Path) -> list[dict]:
    """Those that were written to their end."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _fingerprint() -> str:
    """Of this package's code."""
    total = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(aiscale.__file__).parent.rglob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()
