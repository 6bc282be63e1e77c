"""Radius's published tables in Markdown, one of them beside our own measurements.

published.radius_beside_ours(published.measured("radius_cpu"))     # table 2 of its artifact appendix
published.radius_downstream()                                      # what its authors' repository holds
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from aiscale.published.reader import table

DENSE_SHARE = 0.2  #: of all steps, before Radius begins: as published, 60,000 of 300,000
STEPS = 2000  #: of our runs that stand beside the published ones: the longest that all densities have
_TESTS = {"lambada_openai": "acc", "winogrande": "acc", "wikitext": "word_perplexity"}


def radius_beside_ours(results: Mapping) -> str:
    """Table 2 for GPT-2.0B; right of it what `bench radius` stored: time saved by the same rule, perplexity."""
    step_s = {row["name"]: row["step_s"]["median"] for row in results["speed"]["rows"]}
    runs = {row["case"]: row["val_over_dense_pct"] for row in results["sweep"]["rows"] if row["steps"] == STEPS}
    rows = [row for row in table("radius_perlmutter") if row["model"] == "GPT-2.0B"]
    lines = []
    for row in rows:
        density, interval = row["density_d"], row["update_T"]
        if density is None:
            lines.append(["dense", "", row["wall_clock_days"], "", row["val_ppl"], "", "", ""])
            continue
        saved = 1 - step_s[f"radius d {density:g}, fp32, at once"] / step_s["dense, fp32, at once"]
        over = runs.get(f"radius d {density:g} T {interval} sum switch {DENSE_SHARE:g}")
        theirs = f"{row['val_ppl'] / rows[0]['val_ppl'] - 1:+.1%}"
        ours = [f"{(1 - DENSE_SHARE) * saved:.1%}", f"{over['mean']:+.1f}%"] if over else ["", ""]
        name = f"Radius, d {density:g}"
        printed = f"{row['speedup_pct_printed']:g}%"
        lines.append([name, interval, row["wall_clock_days"], printed, row["val_ppl"], theirs, *ours])
    head = ["", "T", "days", "time saved", "validation ppl", "change", "**ours:** time saved", "ppl, change"]
    return _markdown(head, lines)


def radius_downstream() -> str:
    """Downstream results of GPT-2.0B, with the standard error of each test."""
    found: dict[str, dict[str, str]] = {}
    for row in table("radius_downstream"):
        if row["model"] == "GPT-2.0B" and _TESTS.get(row["task"]) == row["metric"]:
            name = f"Radius, d {row['density_d']:g}, T {row['update_T']}" if row["density_d"] else "dense"
            accuracy = row["metric"] == "acc"
            text = f"{row['value']:.1%} ± {row['stderr']:.1%}" if accuracy else f"{row['value']:.2f}"
            found.setdefault(name, {})[row["task"]] = text
    head = ["", "LAMBADA, accuracy", "WinoGrande, accuracy", "WikiText, perplexity of a word"]
    return _markdown(head, ([name, *(values[task] for task in _TESTS)] for name, values in found.items()))


def _markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
