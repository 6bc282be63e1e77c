"""How a prediction or check is shown, in a notebook or terminal, and kept on one's own disk.

The file is LESSON.json in `$AISCALE_PROGRESS`, else in progress/ of the checkout that holds the
notebook, else of the notebook's folder. It holds guesses and what was checked, and no name of a
person:

    {"predictions": {NAME: {"guess": 4000, "measured": 4096, "ratio": 0.98, "grade": "close", ...}},
     "exercises": {"03.1": {"state": "right", "tries": 3, "hints": 1, "solution": false, ...}}}
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from aiscale.errors import write_whole

_HERE = Path.cwd()  # now: a lesson may change its folder
_CHECKOUT = next(
    (tree for tree in _HERE.parents if (tree / "workshop" / "exercises").is_dir()), _HERE
)
_FOLDER = Path(os.environ.get("AISCALE_PROGRESS") or _CHECKOUT / "progress").absolute()
_unwritten: dict[str, dict] = {}  #: by lesson, what a folder that cannot be written does not keep
_kept_here: dict[str, str] = {}  #: by file, what `keep_once` could not write
_COLORS = {
    "exact": "#1b7a41",
    "close": "#1b7a41",
    "near": "#b98900",
    "off": "#b3261e",
    None: "#8a94a3",
}


class Shown:
    """What has been shown already: a cell that ends with it shows nothing more."""

    def _ipython_display_(self) -> None:
        pass


def shell():
    """The running kernel's shell, or None outside IPython."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def show(text: str, grade: str | None = None, page: str = "", **facts: object) -> None:
    """Print, or in a notebook display, with `facts` in the metadata for tests/answers.py."""
    if not shell():
        print(text)
        return
    from IPython.display import display

    if not page:
        # a name may have a colon
        name = facts.get("predict") or facts.get("against") or text.partition(": ")[0]
        rest = text.removeprefix(f"{name}: ")
        band = (
            f"border-left: 4px solid {_COLORS[grade]}; padding: 0.1em 0.8em; white-space: pre-line"
        )
        rest = re.sub(r"`([^`\n]+)`", r"<code>\1</code>", html.escape(rest))
        page = f'<div style="{band}"><b>{html.escape(name)}</b>: {rest}</div>'
    display({"text/plain": text, "text/html": page}, raw=True, metadata={"aiscale": facts})


def show_table(title: str, table: Sequence[Sequence[str]], note: str = "") -> None:
    """Print, or in a notebook display, rows of text; the first is the heading."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    text = [" | ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    rows = [f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in table]
    page = f"<b>{title}</b><table>{rows[0].replace('td>', 'th>')}{''.join(rows[1:])}</table>"
    show(
        "\n".join([title, *text, *([note] if note else [])]),
        page=f"{page}<small>{html.escape(note)}</small>",
    )


def load(kind: str, lesson: str) -> dict[str, dict]:
    """What is kept of a lesson: its "predictions", or its "exercises"."""
    if lesson in _unwritten:
        return dict(_unwritten[lesson][kind])
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return dict(json.loads((_FOLDER / f"{lesson}.json").read_text())[kind])
    return {}


def save(kind: str, name: str, entry: dict, lesson: str = "") -> None:
    """Keep one entry, replacing an earlier one of this name; in this process alone while the folder
    cannot be written."""
    lesson = lesson or this_lesson()
    entries = _both(lesson)
    entries[kind][name] = {**entry, "at": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())}
    try:
        write(f"{lesson}.json", entries)
        _unwritten.pop(lesson, None)
    except OSError:
        _unwritten[lesson] = entries


def this_lesson() -> str:
    """The name of the notebook that runs, as Jupyter's server sets it."""
    return Path(os.environ.get("JPY_SESSION_NAME") or "notebook").stem


def keep_once(name: str, text: str) -> str:
    """What the file `name` has kept; from now on `text`, if it is new.

    In this process alone while the folder cannot be written.
    """
    with contextlib.suppress(OSError):
        _FOLDER.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            with (_FOLDER / name).open("x") as file:
                file.write(text)
        return (_FOLDER / name).read_text() or text  # empty: another process is about to write
    return _kept_here.setdefault(name, text)


def write(name: str, tree: dict) -> Path:
    _FOLDER.mkdir(parents=True, exist_ok=True)
    return write_whole(_FOLDER / name, json.dumps(tree, indent=1, default=str) + "\n")


def _both(lesson: str) -> dict[str, dict]:
    return {kind: load(kind, lesson) for kind in ("predictions", "exercises")}


def kept() -> dict[str, dict]:
    """All that is kept, by lesson."""
    paths = sorted(_FOLDER.glob("*.json"))
    return {path.stem: _both(path.stem) for path in paths if path.stem != "card"}
