"""Checksums of a checkpoint's files, stored in its note, and of the note itself.

torch may read a damaged file without an error: then a run would silently go on from wrong weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path


def files(folder: Path) -> list[str]:
    """Every file below `folder`, as sorted relative paths."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def fingerprints(folder: Path, names: Iterable[str]) -> dict[str, list]:
    """{name: [bytes, checksum]} of the named files in a folder."""
    return {name: [(folder / name).stat().st_size, _hash(folder / name)] for name in names}


def damage(folder: Path, note: dict, names: Iterable[str]) -> str:
    """What is wrong with the named files of a note; empty if they are unchanged."""
    for name in names:
        nbytes, expected = note["files"][name]
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != nbytes:
            return f"{name} has {size:,} bytes of {nbytes:,}"
        if _hash(path) != expected:
            return f"{name} is not what was written: its checksum differs"
    return ""


def seal(note: dict) -> dict:
    """The note with its own checksum added, or put right."""
    text = json.dumps({key: value for key, value in note.items() if key != "seal"}, sort_keys=True)
    return {**note, "seal": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
