"""Is a checkpoint still what was written? A fingerprint of every file, kept in its note, and of the note itself.

    note["files"] = fingerprints(folder, files(folder))     # {relative path: [bytes, blake2b]}
    seal(note)                                              # the note's own, last
    damage(folder, note, note["files"])                     # "" or what is wrong, in words

Disks and networks flip bits, copies are cut short, a hand deletes a shard. What torch reads of such a file may be
numbers all the same: without this a run would go on from wrong weights and nobody would know.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path


def files(folder: Path) -> list[str]:
    """Every file below `folder`, relative to it, in order."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def fingerprints(folder: Path, names: Iterable[str]) -> dict[str, list]:
    """{name: [bytes, hash]} of some of a folder's files."""
    return {name: [(folder / name).stat().st_size, _hash(folder / name)] for name in names}


def damage(folder: Path, note: dict, names: Iterable[str]) -> str:
    """What is wrong with some of the files that a note lists; empty if they are what was written."""
    for name in names:
        nbytes, expected = note["files"][name]
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (found := path.stat().st_size) != nbytes:
            return f"{name} has {found:,} bytes of {nbytes:,}"
        if _hash(path) != expected:
            return f"{name} is not what was written: its checksum differs"
    return ""


def seal(note: dict) -> dict:
    """The note with a fingerprint of all that it says."""
    return {**note, "seal": _seal(note)}


def is_sealed(note: dict) -> bool:
    """Whether the note says what it said when it was sealed."""
    return note.get("seal") == _seal(note)


def _seal(note: dict) -> str:
    told = json.dumps({key: value for key, value in note.items() if key != "seal"}, sort_keys=True)
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
