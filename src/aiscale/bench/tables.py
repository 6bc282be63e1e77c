"""Prints benchmark results as tables on the terminal, with their checks.

heading(result, "2 ranks, 30 rounds")
table("what a step takes", ("", "ms"), [("DDP step", "31.0")])
result["checks"] = [check("a DDP step over its parts", 1.1, 1.15)]; checks_table(result["checks"])
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def check(name: str, value: float, target: float, *, at_most: bool = True) -> dict:
    """Compare a value with its target: {name, value, target, at_most, met}."""
    met = value <= target if at_most else value >= target
    return {"name": name, "value": value, "target": target, "at_most": at_most, "met": met}


def _console() -> Console:
    """Standard output; if it is no terminal, wide enough that no number wraps."""
    return Console(width=None if sys.stdout.isatty() else 140)


def heading(result: dict, *lines: str) -> None:
    """Print when, where and with which versions `result` was measured, then `lines`."""
    machine = result["machine"]
    about = f"{machine['date']}  {machine['command']}\n{machine['processor']}, {machine['threads']} threads of "
    about += f"{machine['cores']} cores, load {machine['load_average']}; torch {machine['torch']}, "
    about += f"transformers {machine['transformers']}, python {machine['python']}"
    _console().print(about, *lines, sep="\n", markup=False)


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; cells may contain rich markup."""
    grid = Table(*heads, title=title, title_justify="left")
    for row in rows:
        grid.add_row(*row)
    _console().print(grid)


def checks_table(checks: list[dict]) -> None:
    rows = []
    for each in checks:
        target = f"{'at most' if each['at_most'] else 'at least'} {each['target']:g}"
        rows.append((each["name"], f"{each['value']:.3f}", target, "[green]met" if each["met"] else "[red]missed"))
    if rows:
        table("", ("promise", "measured", "target", ""), rows)
