"""How a prediction is shown, in a notebook or a terminal, and kept on the participant's own disk.

    show("bytes of a step: within 10 %", "close", against="bytes of a step", measured=4096)
    save("bytes of a step", {"kind": "number", "guess": 4000, ...})    # -> progress/03_ddp.json

The file is `$AISCALE_PROGRESS/LESSON.json`, or progress/LESSON.json in the notebook's folder. It holds guesses only:

    {"version": 1, "lesson": "03_ddp", "predictions": {NAME: {
        "kind": "number" | "choice" | "grid", "unit": "bytes", "guess": 1572864, "measured": 3145728 | null,
        "ratio": 0.5 | null,                                              guess / measured, of numbers
        "grade": "exact" | "close" | "near" | "off" | null,               close: within 10 %; near: a factor of 2, or
                                                                          at least half the cells; null: not measured
        "at": "2026-11-22T13:30:00+00:00"}}}
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import sys
import time
from pathlib import Path

_FOLDER = Path(os.environ.get("AISCALE_PROGRESS") or "progress").absolute()  # now: a lesson may change its folder
_COLORS = {"exact": "#1b7a41", "close": "#1b7a41", "near": "#b98900", "off": "#b3261e", None: "#8a94a3"}


def shell():
    """The running kernel's shell, or None outside IPython."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def show(text: str, grade: str | None = None, page: str = "", **facts: object) -> None:
    """Print, or in a notebook display, with `facts` in the output's metadata for `aiscale.book.answers`."""
    if not shell():
        print(text)
        return
    from IPython.display import display

    if not page:
        name, _, rest = text.partition(": ")
        band = f"border-left: 4px solid {_COLORS[grade]}; padding: 0.1em 0.8em; white-space: pre-line"
        page = f'<div style="{band}"><b>{html.escape(name)}</b>: {html.escape(rest)}</div>'
    display({"text/plain": text, "text/html": page}, raw=True, metadata={"aiscale": facts})


def save(name: str, entry: dict) -> None:
    """Keep one prediction, replacing an earlier one of this name; a folder that cannot be written disturbs nobody."""
    lesson = Path(os.environ.get("JPY_SESSION_NAME") or "notebook").stem  # set by Jupyter's server
    path = _FOLDER / f"{lesson}.json"
    kept = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = dict(json.loads(path.read_text())["predictions"])
    kept[name] = {**entry, "at": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        tree = {"version": 1, "lesson": lesson, "predictions": kept}
        partial.write_text(json.dumps(tree, indent=1, default=str) + "\n")
        partial.replace(path)
