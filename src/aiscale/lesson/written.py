"""Files that a notebook's cells write; what was edited by hand is never overwritten."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

places: dict[str, Path] = {}  #: by a gap's id, the script in which it is


def write(path: str | Path, text: str) -> str:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # digests of what was written here, to know what was edited since
    record = path.parent / ".written"
    digests = set(record.read_text().split()) if record.exists() else set()
    summary = f"{path.name}: {len(text.splitlines())} lines"
    if path.exists() and path.read_text() != text and _digest(path.read_text()) not in digests:
        numbers = (path.with_name(f"{path.stem}.{n}{path.suffix}") for n in itertools.count(1))
        path.rename(backup := next(name for name in numbers if not name.exists()))
        summary += f"; what you wrote there is now {backup.name}"
    path.write_text(text)
    record.write_text("\n".join(sorted(digests | {_digest(text)})))
    return summary


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
