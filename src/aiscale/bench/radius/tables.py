"""The results of bench.radius as tables, and those that are kept with the package.

    show_radius(bench_radius())         # steps, or with sweep=True perplexities
    stored()                            # {"speed": ..., "sweep": ...} as measured on the machine that they name
    python -m aiscale.bench.radius.tables SPEED.json RUNS.jsonl > src/aiscale/published/measured/radius_cpu.json

SPEED.json is what `aiscale bench radius --json` printed, RUNS.jsonl the file of `aiscale bench radius --sweep`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from aiscale import published
from aiscale.bench.model_tables import _checks_table


def stored() -> dict:
    """What was measured and kept: {"speed": of bench_radius, "sweep": {"rows", "runs", "runs_left", ...}}."""
    return published.measured("radius_cpu")


def show_radius(result: dict) -> None:
    """Print what bench_radius returned."""
    # A pipe has no width: a table cut to 80 columns would break its numbers.
    console = Console(width=None if sys.stdout.isatty() else 140)
    if "runs" in result:
        _show_sweep(console, result)
        return
    machine = result["machine"]
    console.print(
        f"{machine['date']}  {machine['command']}\n{machine['processor']}, {machine['cores']} cores,", end=" "
    )
    console.print(f"load {machine['load_average']} at the end; torch {machine['torch']}")
    console.print(
        f"{result['ranks']} ranks, {result['parameters']:,} parameters, {result['tokens']} tokens a step, "
        f"{result['rounds']} rounds; {result['link']} link of {result['link_mbit_s']:.1f} Mbit/s, where the exchange "
        f"takes {result['share_here']:.1%} of a dense step (published: {result['share']:.1%})"
    )
    for table in (_steps_table(result), _masking_table(result), _break_even_table(result), _rates_table(result)):
        console.print(table)
    if result["checks"]:
        console.print(_checks_table(result["checks"]))


def _steps_table(result: dict) -> Table:
    bases = [base for base in result["rows"][0]["saving"]] + [result["rows"][0]["name"]]
    bases = [row["name"] for row in result["rows"] if row["name"] in bases]
    title = f"a step; of radius, {result['interval'] - 1} sparse ones and a dense one; time saved over each baseline"
    table = Table("", "s", "quartiles", "payload", "sent", "peak", *bases, title=title, title_justify="left")
    for row in result["rows"]:
        table.add_row(
            row["name"],
            f"{row['step_s']['median']:.3f}",
            f"{row['step_s']['low']:.3f} to {row['step_s']['high']:.3f}",
            f"{row['payload_bytes'] / 1e6:.2f} MB",
            f"{row['wire_bytes'] / 1e6:.2f} MB",
            f"{row['peak_bytes'] / 1e6:.1f} MB",
            *(f"{row['saving'][base]['median']:+.1%}" if base in row["saving"] else "" for base in bases),
        )
    return table


def _masking_table(result: dict) -> Table:
    title = "what a sparse step of radius does beside sending, by itself, and the all-reduce time that it saves"
    heads = ("", "own work", "an entry", "all-reduce", "saved", "own work / saved")
    table = Table(*heads, title=title, title_justify="left")
    for part in result["masking"]:
        table.add_row(
            part["name"],
            f"{1e3 * part['masking_s']['median']:.1f} ms",
            f"{part['masking_ns_per_entry']:.1f} ns",
            f"{1e3 * part['all_reduce_s']['median']:.1f} ms",
            f"{1e3 * part['saved_s']:.1f} ms",
            f"{part['share_of_saved']:.1%}",
        )
    return table


def _break_even_table(result: dict) -> Table:
    bases = list(dict.fromkeys(part["over"] for part in result["break_even"]))
    found = {(part["wire"], part["overlap"], part["over"]): part["density"] for part in result["break_even"]}
    title = "density below which radius is faster (above 1: at any; below 0: never; not told: its steps do not grow)"
    table = Table("radius", *(f"than {base}" for base in bases), title=title, title_justify="left")
    for wire, overlap in dict.fromkeys(key[:2] for key in found):
        way = f"{'bf16' if wire == 'bf16' else 'fp32'}, {'overlapped' if overlap else 'at once'}"
        cells = (found[wire, overlap, base] for base in bases)
        table.add_row(way, *("not told" if d is None else f"{d['median']:.2f}" for d in cells))
    return table


def _rates_table(result: dict) -> Table:
    names = list(dict.fromkeys(row["name"] for row in result["rates"]))
    title = "times as fast as a dense fp32 all-reduce at once, by the link's rate; of radius, sparse steps"
    table = Table("Mbit/s", *names, title=title, title_justify="left")
    for rate in dict.fromkeys(row["link_mbit_s"] for row in result["rates"]):
        cells = {row["name"]: row["speedup"]["median"] for row in result["rates"] if row["link_mbit_s"] == rate}
        table.add_row(f"{rate:.1f}", *(f"{cells[name]:.2f}" if name in cells else "" for name in names))
    return table


def _show_sweep(console: Console, result: dict) -> None:
    for steps in dict.fromkeys(row["steps"] for row in result["rows"]):
        table = Table(
            "",
            "sent / dense",
            "rate",
            "seeds",
            "train ppl",
            "validation ppl",
            "over dense, range",
            title=f"{steps} steps, each at the best of its learning rates",
            title_justify="left",
        )
        for row in (row for row in result["rows"] if row["steps"] == steps):
            over = row["val_over_dense_pct"]
            table.add_row(
                row["case"],
                f"{row['wire_share']:.3f}",
                f"{row['lr']:g} of {row['rates_tried']}{', at the edge' * row['best_at_edge']}",
                str(len(row["seeds"])),
                f"{row['train_ppl']['mean']:.3f}",
                f"{row['val_ppl']['mean']:.3f}",
                f"{over['mean']:+.1f} %, {over['low']:+.1f} to {over['high']:+.1f}" if over else "",
            )
        console.print(table)
    console.print(f"{result['runs']} runs made, {result['runs_left']} left of the whole grid")


def _collect(speed: Path | None, runs: Path) -> dict:
    """What is kept: curves of the main cases only."""
    from aiscale.bench.radius.runs import cases
    from aiscale.bench.radius.sweep import Grid, load, read_machines, table

    rows, known = load(runs), cases()
    cells = table(rows)
    for cell in cells:
        if not known[cell["case"]].contender:
            del cell["train_curve"], cell["val_curve"], cell["error_curve"]
    sweep = {"rows": cells, "runs": len(rows), "runs_left": Grid().left(rows), "machines": read_machines(runs)}
    return {"speed": json.loads(speed.read_text()) if speed else None, "sweep": sweep}


if __name__ == "__main__":
    speed_file, runs_file = sys.argv[1:]
    print(json.dumps(_collect(Path(speed_file) if speed_file != "-" else None, Path(runs_file)), indent=1))
