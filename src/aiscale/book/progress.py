"""How far a run of notebooks is: a live table on a terminal, a line per notebook elsewhere; on standard error.

    with TableProgress().over(notebooks): ...

`Progress` itself says nothing and is what a library call uses.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from aiscale.book.notebook import Notebook
from aiscale.book.results import Result


class Progress:
    """What `running.run` reports; silent."""

    @contextmanager
    def over(self, notebooks: Sequence[Notebook]) -> Iterator[None]:
        """The run, from its first notebook to its last."""
        yield

    def started(self, notebook: Notebook, cells: int) -> None:
        """A notebook with so many code cells starts."""

    def cell(self, number: int) -> None:
        """Its code cell `number`, counted from 1, starts."""

    def tick(self) -> None:
        """Time passes."""

    def finished(self, result: Result) -> None:
        """It has ended."""

    def kept(self, result: Result) -> None:
        """It is not run, because an earlier result still holds."""


class LineProgress(Progress):
    """A line per notebook: for logs."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr

    def _say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def started(self, notebook: Notebook, cells: int) -> None:
        self._say(f"{notebook.name}: {cells} cells")

    def finished(self, result: Result) -> None:
        where = f" in cell {result.failure.cell}" if result.failure and result.failure.cell else ""
        self._say(f"{result.name}: {result.state}{where} after {result.seconds:.1f} s")

    def kept(self, result: Result) -> None:
        self._say(f"{result.name}: passed earlier, unchanged since")


@dataclass
class _Row:
    name: str
    cells: int
    cell: int = 0
    state: str = "waits"
    started: float = 0.0
    seconds: float | None = None


class TableProgress(Progress):
    """A table that is drawn anew while the notebooks run: notebook, cell, seconds, state."""

    COLORS = {"waits": "dim", "runs": "cyan", "passed": "green", "unchanged": "green", "failed": "bold red"}

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._rows: dict[str, _Row] = {}
        self._row: _Row | None = None
        self._live: Live | None = None

    @contextmanager
    def over(self, notebooks: Sequence[Notebook]) -> Iterator[None]:
        for notebook in notebooks:
            cells = sum(cell.cell_type == "code" for cell in notebook.content.cells)
            self._rows[notebook.name] = _Row(notebook.name, cells)
        # rich asks for the table four times a second, so that seconds run while a cell does.
        with Live(get_renderable=self.table, console=self.console, refresh_per_second=4) as self._live:
            yield

    def started(self, notebook: Notebook, cells: int) -> None:
        self._row = self._rows[notebook.name]
        self._row.state, self._row.started = "runs", time.monotonic()

    def cell(self, number: int) -> None:
        self._row.cell = number

    def finished(self, result: Result) -> None:
        row = self._rows[result.name]
        row.state, row.seconds = result.state, result.seconds
        if result.state == "passed":
            row.cell = row.cells

    def kept(self, result: Result) -> None:
        row = self._rows[result.name]
        row.state, row.seconds, row.cell = "unchanged", result.seconds, row.cells

    def table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("notebook")
        table.add_column("cell", justify="right")
        table.add_column("", width=20)
        table.add_column("seconds", justify="right")
        table.add_column("state")
        for row in self._rows.values():
            table.add_row(*self._cells(row), style="dim" if row.state == "waits" else "")
        return table

    def _cells(self, row: _Row) -> tuple[str, ...]:
        done = row.cell - (row.state == "runs") if row.cell else 0
        filled = round(20 * done / row.cells) if row.cells else 0
        color = self.COLORS.get(row.state, "yellow")
        seconds = row.seconds if row.seconds is not None else time.monotonic() - row.started if row.started else None
        return (
            row.name,
            f"{row.cell}/{row.cells}",
            f"[{color}]{'━' * filled}[/][bright_black]{'─' * (20 - filled)}[/]",
            "" if seconds is None else f"{seconds:.1f}",
            f"[{color}]{row.state}[/]",
        )


def make_progress() -> Progress:
    """The table on a terminal, lines elsewhere."""
    console = Console(stderr=True)
    return TableProgress(console) if console.is_terminal else LineProgress()
