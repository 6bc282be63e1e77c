"""The ladder as a table for a terminal: `Console().print(table(climb()))`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from aiscale.verify.ladder import Verdict


def table(verdicts: Sequence[Verdict]) -> Table:
    """One row a rung: how far its losses, gradient norms and weights are from serial, and whether that is allowed."""
    told = [f"{verdict.rung.name}: {verdict.error}" for verdict in verdicts if verdict.error]
    count = f"{sum(verdict.holds for verdict in verdicts)} of {len(verdicts)} hold"
    # As text, because an error may hold what rich takes for markup.
    result = Table(
        box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=Text("\n".join([count, *told])), caption_justify="left"
    )
    for column in ("rung", "loss", "norm", "weights", "allowed", ""):
        result.add_column(column, justify="left" if column in ("rung", "") else "right", no_wrap=True)
    for v in verdicts:
        differences = (v.loss_difference, v.norm_difference, v.weight_difference)
        state = Text("holds", "green") if v.holds else Text("failed" if v.error else "differs", "red")
        numbers = ["-" if v.error else f"{difference:.1e}" for difference in differences]
        result.add_row(v.rung.name, *numbers, f"{v.tolerance:.0e}", state)
    return result
