"""`aiscale bench report A.csv`: a study's results as one self-contained page, with the gallery's look.

Path("laptop.html").write_text(study_page(load("laptop.csv")))
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence

import matplotlib.pyplot as plt
from markupsafe import Markup
from matplotlib.axes import Axes

from aiscale import plots
from aiscale.bench.study.results import HEADS, cells, drift, facts, summary
from aiscale.book.gallery import Cell, sheet


def study_page(rows: Sequence[dict]) -> str:
    """The page; what it shows, it has read from `rows`."""
    entries, name = summary(rows), rows[0]["study"] if rows else "without rows"
    ratios = {entry["cell"]: [entry["ratio"]] for entry in entries if "ratio" in entry}
    plots.use_style()
    parts = [
        f"<p>{html.escape(facts(rows))}</p><h2>Median step of the second epoch, times its steps, over the base's</h2>",
        "<p>A dot is a median of runs, a line its interval; each run is divided by the base's runs beside it.</p>",
        _figure(plots.study_ratios(ratios)) if ratios else "<p>No cell has been timed.</p>",
        f'<h2>Every cell</h2><div class="wide figures" tabindex="0"><table>{_row("th", HEADS)}',
        *(_row("td", cells(entry)) for entry in entries),
        "</table></div><h2>The base through the study</h2><p>The same run, again and again: what moves here is the ",
        "machine, and no effect smaller than this can be seen without the division above.</p>",
        _figure(plots.study_drift([seconds for _, seconds in drift(rows)])),
    ]
    return sheet(f"Study {name}", [Cell("prose", 0, Markup("".join(parts)))])


def _row(kind: str, texts: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{kind}>{html.escape(text)}</{kind}>' for text in texts)}</tr>"


def _figure(ax: Axes) -> str:
    file, words = io.BytesIO(), html.escape(plots.describe(ax.figure))
    ax.figure.savefig(file, format="png", dpi=160)
    plt.close(ax.figure)
    encoded = base64.b64encode(file.getvalue()).decode()
    return f'<figure><img src="data:image/png;base64,{encoded}" alt="{words}"></figure>'
