"""How far `aiscale plan` is from published runs: step time, memory, what fits, which is faster.

    python benchmarks/planner/scoreboard.py            # four tables, in twenty seconds
    python benchmarks/planner/scoreboard.py --store    # into the files that show them

These are planner.json of the package, the planner, and the README. Each source (a published table,
see `runs`) is predicted with constants that were fitted without it; then with constants that were
fitted without any run of its program; each model of the large sweep without that model; then all of
them with the constants of the package. Under each table stands the median over sources: one sweep
has most of the runs. `scores` says what a stall is; `choices` what regret is, the second measure.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from bands import bands, witnesses
from choices import groups, regret
from runs import SOURCES, runs
from said import lines, reasons, stall_rows
from scores import (
    Score,
    blind,
    halves,
    is_stall,
    scoreboard,
    step_s,
    without_program,
    would_run,
)

from aiscale.plan import published
from aiscale.plan.answer import predict
from aiscale.plan.constants import CONSTANTS

README = Path(__file__).parents[2] / "README.md"
MARKS = ("<!-- scoreboard -->", "<!-- end of scoreboard -->")
STORED = Path(published.__file__).parent / "measured" / "planner.json"
FOR_PLAN = Path(published.__file__).parents[1] / "scoreboard.toml"
SHOWN = ("nanotron_sweep", "bloom_176b_topology_sweep")  #: tables whose layouts lesson 11 shows
TITLES = (
    "constants fitted without the source that they predict",
    "constants fitted without any run of the program that they predict",
    "one model of the large sweep left out, the other kept",
    "constants of the package, fitted on all sources",
)
NOTE = (
    "step, memory: median and mean |predicted / measured - 1| in %; stalls: runs over 2.5 times "
    "what the package's\n"
    "constants predict, left out of step and mean, counted in `stalls in`; ran fit, crash not: "
    "share of runs that ran\n"
    "and were predicted to fit, of crashed ones predicted not to; rank: Spearman's correlation of "
    "layouts of one model."
)

# For lesson 11 -----------------------------------------------------------------------------------


def points(source: str) -> dict[str, list]:
    """Every timed run but the stalls: seconds of a step."""
    timed = [run for run in runs(source) if run.step_s and not is_stall(run)]
    return {
        "published_s": [_digits(run.step_s) for run in timed],
        "predicted_s": [_digits(step_s(run, blind(source))) for run in timed],
    }


def court() -> list[dict]:
    """Runs of the sweep close to what a device holds, and whether they would run.
    The constants were fitted without it."""
    c, rows = blind("nanotron_sweep"), []
    for run in runs("nanotron_sweep"):
        shape, layout = run.shape, run.layout
        pieces = layout.pp * layout.virtual_stages
        if (
            pieces <= shape.layers
            and 0.6 < predict(shape, layout, run.platform, c).memory_gb / 75 < 1.7
        ):
            row = {
                "parameters_B": _digits(shape.parameters / 1e9),
                "layers": shape.layers,
                "hidden": shape.hidden,
            }
            row |= {
                name: getattr(layout, name)
                for name in ("gpus", "dp", "tp", "pp", "zero_stage", "micro_batches")
            }
            row["micro_batch_tokens"] = layout.micro_batch * shape.seq
            rows.append(row | {"ran": run.ran, "predicted_to_run": would_run(run, c)})
    return rows


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


# The command -------------------------------------------------------------------------------------


def table(rows: list[Score]) -> str:
    titles = (
        "runs",
        "stalls",
        "step",
        "mean",
        "stalls in",
        "memory",
        "mean",
        "ran fit",
        "crash not",
        "rank",
    )
    lines = [f"{'median |error| in %':34}" + "".join(f"{title:>10}" for title in titles)]
    for row in rows:
        cells = (
            row.runs,
            row.stalls,
            row.step_median_pct,
            row.step_mean_pct,
            row.step_with_stalls_pct,
            row.memory_median_pct,
            row.memory_mean_pct,
            row.ran_predicted_to_fit_pct,
            row.crashed_predicted_not_to_pct,
            row.rank_correlation,
        )
        lines.append(
            f"{row.source:34}" + "".join(f"{'-' if cell is None else cell:>10}" for cell in cells)
        )
    return "\n".join(lines)


def written(result: dict) -> str:
    """JSON, a line for each row and each source, so that a change can be read."""
    parts = []
    for name, value in result.items():
        rows = [json.dumps(row) for row in value] if isinstance(value, list) else []
        rows = rows or [f"{json.dumps(key)}: {json.dumps(row)}" for key, row in value.items()]
        start, end = "[]" if isinstance(value, list) else "{}"
        parts.append(f"{json.dumps(name)}: {start}\n" + ",\n".join(rows) + f"\n{end}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _toml(said: list[str]) -> str:
    """What the planner itself reads: lines, ranges, chips with published runs, stalls."""
    text = "# Written by `python benchmarks/planner/scoreboard.py --store`.\nlines = [\n"
    text += "".join(f"    {json.dumps(line)},\n" for line in said) + "]\n\n"
    text += "# Accelerators of which published runs were read.\n"
    text += f"witnesses = {json.dumps(witnesses())}\n\n"
    text += "# Measured over predicted: 8 of 10 published runs lie between, "
    text += "each table weighing the same.\n[bands]\n"
    for program, rows in bands().items():
        text += f"{program} = {_inline(rows)}\n"
    text += "\n# Runs and stalls; nodes and replicas: at least so many.\n[stalls]\nrows = [\n"
    return text + "".join(f"    {_inline(row)},\n" for row in stall_rows()) + "]\n"


def _inline(row: dict) -> str:
    return "{ " + ", ".join(f"{name} = {json.dumps(value)}" for name, value in row.items()) + " }"


def _boards() -> dict[str, list[Score]]:
    return {
        "left_out": scoreboard(blind),
        "program_left_out": scoreboard(without_program),
        "one_model_left_out": halves(),
        "fitted_on_all": scoreboard(lambda source: CONSTANTS),
    }


def _result() -> dict:
    """What is stored: the lines, the scores, and what lesson 11 draws and lets you choose."""
    boards, regrets = _boards(), regret(blind)
    result = {
        "about": {"command": "python benchmarks/planner/scoreboard.py --store"},
        "lines": lines(boards, regrets),
        "reasons": reasons(),
    }
    result |= {name: [asdict(row) for row in rows] for name, rows in boards.items()}
    result |= {"regret": regrets, "points": {source: points(source) for source in SOURCES}}
    result["choices"] = {
        source: [asdict(group) for group in groups(source, blind(source))] for source in SHOWN
    }
    return result | {"court": court()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--json", action="store_true", help="print JSON, with the points and the court of lesson 11"
    )
    parser.add_argument(
        "--store", action="store_true", help="write that JSON, and its lines where they are shown"
    )
    args = parser.parse_args()
    if not (args.json or args.store):
        boards = _boards()
        for title, rows in zip(TITLES, boards.values(), strict=True):
            print(f"{title}\n{table(rows)}\n")
        print("\n".join([*lines(boards, regret(blind)), "", *reasons(), "", NOTE]))
        return
    result = _result()
    text = written(result)
    if args.json:
        print(text, end="")
    if args.store:
        STORED.write_text(text, encoding="utf-8")
        FOR_PLAN.write_text(_toml(result["lines"]), encoding="utf-8")
        start, _, rest = README.read_text(encoding="utf-8").partition(MARKS[0])
        shown = "\n".join(f"- {line}" for line in result["lines"])
        README.write_text(
            f"{start}{MARKS[0]}\n{shown}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
