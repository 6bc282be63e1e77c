"""One self-contained HTML page of a study's results: `aiscale bench report A.csv`.

Path("laptop.html").write_text(page(load("laptop.csv")))
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from string import Template

from aiscale.bench.study.results import HEADS, cells, drift, facts, summary

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Study $name</title><style>
body { font: 15px/1.5 system-ui, sans-serif; color: #2b313b; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% } th, td { padding: .25rem .6rem; text-align: right }
th { border-bottom: 2px solid #7c828a } td { border-bottom: 1px solid #d5d8dd }
th:first-child, td:first-child { text-align: left } .muted { color: #6b7380 } svg { width: 100%; height: auto }
</style></head><body>
<h1>Study $name</h1><p class="muted">$facts</p>
<h2>Time of the second epoch over the base's</h2>
<p>A dot is the median of the runs, a line its interval; each run is divided by the base's runs beside it.</p>
$ratios
<h2>Every cell</h2>
<table>$rows</table>
<h2>The base through the study</h2>
<p>The same run, again and again: what moves here is the machine, and no effect smaller than this can be seen without
the division above.</p>$drift
</body></html>
""")


def page(rows: Sequence[dict]) -> str:
    """The page; what it shows, it has read from `rows`."""
    entries, name = summary(rows), rows[0]["study"] if rows else "without rows"
    lines = [_row("th", HEADS), *(_row("td", cells(entry)) for entry in entries)]
    timed = [entry for entry in entries if "ratio" in entry]
    return _PAGE.substitute(
        name=html.escape(str(name)),
        facts=html.escape(facts(rows)),
        ratios=_ratios(timed),
        rows="".join(lines),
        drift=_drift([seconds for _, seconds in drift(rows)]),
    )


def _row(kind: str, texts: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{kind}>{html.escape(text)}</{kind}>' for text in texts)}</tr>"


def _ratios(entries: Sequence[dict]) -> str:
    """Dots and intervals on a logarithmic axis, as SVG."""
    if not entries:
        return "<p>No cell has been timed.</p>"
    low = min(1.0, *(entry["ratio"]["low"] for entry in entries)) / 1.1
    high = max(1.0, *(entry["ratio"]["high"] for entry in entries)) * 1.1
    top, step, left, right = 10, 24, 420, 880

    def x(value: float) -> float:
        return left + (right - left) * math.log(value / low) / math.log(high / low)

    bottom = top + step * len(entries)
    marks = [value for value in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if low <= value <= high]
    parts = [f'<line x1="{x(v):.1f}" x2="{x(v):.1f}" y1="{top}" y2="{bottom}" stroke="#d5d8dd"/>' for v in marks]
    parts += [f'<text x="{x(v):.1f}" y="{bottom + 16}" text-anchor="middle">{v:g}</text>' for v in marks]
    for number, entry in enumerate(entries):
        y, ratio = top + step * (number + 0.5), entry["ratio"]
        parts.append(f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{html.escape(entry["cell"])}</text>')
        line = f'x1="{x(ratio["low"]):.1f}" x2="{x(ratio["high"]):.1f}" y1="{y}" y2="{y}"'
        parts.append(f'<line {line} stroke="#0068b8" stroke-width="3"/>')
        parts.append(f'<circle cx="{x(ratio["median"]):.1f}" cy="{y}" r="5" fill="#0068b8"/>')
        parts.append(f'<text x="{right + 14}" y="{y + 4}">{ratio["median"]:.2f}</text>')
    return _svg(parts, 950, bottom + 26, "time of each cell over the base")


def _drift(seconds: Sequence[float]) -> str:
    top, width, height = max(seconds, default=1) * 1.1, 880, 140
    across = width / max(1, len(seconds))
    dots = [(60 + across * (i + 0.5), 10 + height * (1 - value / top), value) for i, value in enumerate(seconds)]
    parts = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{value:.3f} s</title></circle>' for x, y, value in dots]
    parts.append(f'<line x1="60" x2="{width + 60}" y1="{height + 10}" y2="{height + 10}" stroke="#7c828a"/>')
    parts += [f'<text x="50" y="{y + 4:.1f}" text-anchor="end">{value:.2f} s</text>' for _, y, value in dots[:1]]
    return _svg(parts, 950, height + 26, "seconds of the base's runs in their order, from 0")


def _svg(parts: Sequence[str], width: int, height: float, about: str) -> str:
    head = f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{about}" font-size="13" fill="#2b313b">'
    return head + "".join(parts) + "</svg>"
