"""How far `aiscale plan` is from published runs: step time, memory, what fits, which is faster.

    python benchmarks/planner/scoreboard.py            # four tables, in ten seconds
    python benchmarks/planner/scoreboard.py --store    # into the files that show them

These are planner.json of the package, the planner, and the README. Each source (a published table,
see `runs`) is predicted with constants that were fitted without it; then with constants that were
fitted without any run of its program; each model of the large sweep without that model; then all of
them with the constants of the package. Under each table stands the median over sources: one sweep
has most of the runs.

A *stall* is a run measured at over 2.5 times what the package's constants predict: in nanotron's
sweep a fifth of the runs, mostly pipelines, waits about a second a micro-batch whatever the work,
and exact repeats differ by up to 400 %. Stalls are counted, never fitted, and left out of the
errors; a column of its own gives the error with them.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace

from runs import MEGATRON, SOURCES, Run, runs
from scipy.stats import spearmanr

from aiscale.errors import ConfigError
from aiscale.plan import published
from aiscale.plan.answer import predict
from aiscale.plan.constants import CONSTANTS, constants
from aiscale.plan.memory import fits, peak_bytes
from aiscale.plan.step import step_seconds

#: {what was left out: the constants fitted without it}
LEFT_OUT = Path(__file__).parent / "left_out.json"
#: The two models of the large sweep, to leave out one and keep the other: no other source has a
#: host-bound pipeline.
HALVES = {"nanotron_sweep 1B": "16 layers", "nanotron_sweep 8B": "32 layers"}
#: the name in left_out.json of the fit without any of them
FAMILY = "Megatron-LM and its descendants"
OVERALL = "median over sources"
STALL = 2.5
COUNTS = ("runs", "timed", "stalls", "memory_runs")
FAR_PCT = 18
README = Path(__file__).parents[2] / "README.md"
MARKS = ("<!-- scoreboard -->", "<!-- end of scoreboard -->")
STORED = Path(published.__file__).parent / "measured" / "planner.json"
FOR_PLAN = Path(published.__file__).parents[1] / "plan" / "scoreboard.toml"
TITLES = (
    "constants fitted without the source that they predict",
    "constants fitted without any run of the program that they predict",
    "one model of the large sweep left out, the other kept",
    "constants of the package, fitted on all sources",
)
LEAST_RANKED = 5  #: layouts of one model that are worth ranking
NOTE = (
    "step, memory: median and mean |predicted / measured - 1| in %; stalls: runs over 2.5 times "
    "what the package's\n"
    "constants predict, left out of step and mean, counted in `stalls in`; ran fit, crash not: "
    "share of runs that ran\n"
    "and were predicted to fit, of crashed ones predicted not to; rank: Spearman's correlation of "
    "layouts of one model."
)


@dataclass(frozen=True, kw_only=True)
class Score:
    """Errors are |predicted / measured - 1| in percent; None without such runs."""

    source: str
    runs: int
    timed: int
    stalls: int
    step_median_pct: float | None
    step_mean_pct: float | None
    step_with_stalls_pct: float | None  #: median
    memory_runs: int
    memory_median_pct: float | None
    memory_mean_pct: float | None
    ran_predicted_to_fit_pct: float | None
    crashed_predicted_not_to_pct: float | None
    rank_correlation: float | None  #: Spearman's, of the layouts of one model, mean over models


@lru_cache
def blind(part: str) -> SimpleNamespace:
    """Constants fitted without this source, Megatron's family, or half of the sweep."""
    return constants(**json.loads(LEFT_OUT.read_text())[part])


def without_program(source: str) -> SimpleNamespace:
    """The constants fitted without any run of the program that ran this source."""
    return blind(FAMILY if source in MEGATRON else source)


def scoreboard(fitted: Callable[[str], SimpleNamespace]) -> list[Score]:
    """One row a source, predicted by the constants that `fitted` returns, and their medians."""
    rows = [_score(source, _errors(runs(source), fitted(source))) for source in SOURCES]
    whole = {"source": OVERALL} | {name: sum(getattr(row, name) for row in rows) for name in COUNTS}
    for name in (f.name for f in fields(Score) if f.name not in whole):
        whole[name] = round(
            median(value for row in rows if (value := getattr(row, name)) is not None), 3
        )
    return [*rows, Score(**whole)]


def halves() -> list[Score]:
    """Each model of the large sweep, by constants that saw the other one and all other sources."""
    sweep = runs("nanotron_sweep")
    chosen = {
        half: [run for run in sweep if run.model.startswith(model)]
        for half, model in HALVES.items()
    }
    return [_score(half, _errors(rows, blind(half))) for half, rows in chosen.items()]


def _errors(chosen: Iterable[Run], c: SimpleNamespace) -> dict[str, list]:
    """What these runs add to a score: errors, which would run, (rank correlation, layouts)."""
    errors: dict[str, list] = {
        name: [] for name in ("ran", "crashed", "step", "all steps", "memory", "ranks")
    }
    layouts: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for run in chosen:
        errors["ran" if run.ran else "crashed"].append(would_run(run, c))
        if run.memory_bytes:
            errors["memory"].append(abs(memory_bytes(run, c) / run.memory_bytes - 1))
        if run.step_s:
            predicted = step_s(run, c)
            errors["all steps"].append(abs(predicted / run.step_s - 1))
            if not is_stall(run):
                errors["step"].append(errors["all steps"][-1])
                layouts[run.model].append((predicted, run.step_s))
    ranked = [pairs for pairs in layouts.values() if len(pairs) >= LEAST_RANKED]
    errors["ranks"] = [
        (spearmanr(*zip(*pairs, strict=True)).statistic, len(pairs)) for pairs in ranked
    ]
    return errors


def would_run(run: Run, c: SimpleNamespace) -> bool:
    """Whether the planner takes the layout, and predicts that it fits."""
    try:
        run.layout.check(run.shape)
    except ConfigError:
        return False
    return fits(run.shape, run.layout, run.platform, c)


def step_s(run: Run, c: SimpleNamespace) -> float:
    return step_seconds(run.shape, run.layout, run.platform, c).total_s


def memory_bytes(run: Run, c: SimpleNamespace) -> float:
    return peak_bytes(run.shape, run.layout, c, 0 if run.first_stage else None)


def is_stall(run: Run) -> bool:
    return bool(run.step_s) and run.step_s > STALL * step_s(run, CONSTANTS)


def _score(source: str, errors: dict[str, list]) -> Score:
    def percent(values: list, middle) -> float | None:
        return round(100 * middle(values), 1) if values else None

    step, every, memory, ranks = (errors[name] for name in ("step", "all steps", "memory", "ranks"))
    ran, crashed = errors["ran"], errors["crashed"]
    return Score(
        source=source,
        runs=len(ran) + len(crashed),
        timed=len(every),
        stalls=len(every) - len(step),
        step_median_pct=percent(step, median),
        step_mean_pct=percent(step, fmean),
        step_with_stalls_pct=percent(every, median),
        memory_runs=len(memory),
        memory_median_pct=percent(memory, median),
        memory_mean_pct=percent(memory, fmean),
        ran_predicted_to_fit_pct=percent(ran, fmean),
        crashed_predicted_not_to_pct=None if not crashed else round(100 - 100 * fmean(crashed), 1),
        rank_correlation=round(float(sum(r * n for r, n in ranks) / sum(n for _, n in ranks)), 3)
        if ranks
        else None,
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


def bands() -> dict[str, dict[str, list[float]]]:
    """Measured over predicted: 8 of 10 runs lie between, each table weighing the same.
    Stalls are left out. Seen: others of the program were fitted, and none of the table."""
    seen = [(runs(source), blind(source)) for source in MEGATRON]
    seen += [
        ([run for run in runs("nanotron_sweep") if run.model.startswith(m)], blind(h))
        for h, m in HALVES.items()
    ]
    unseen = [(runs(source), without_program(source)) for source in SOURCES]
    known, new = _bands(seen), _bands(unseen)  # an unseen program is not known better
    wide = {
        name: [min(known[name][0], new[name][0]), max(known[name][1], new[name][1])]
        for name in known
    }
    return {"seen": known, "unseen": wide}


def _bands(parts: list[tuple[Iterable[Run], SimpleNamespace]]) -> dict[str, list[float]]:
    ratios: dict[str, list[list[float]]] = defaultdict(list)
    for chosen, c in parts:
        mine: dict[str, list[float]] = {"one_node": [], "many_nodes": [], "memory": []}
        for run in chosen:
            if run.step_s and not is_stall(run):
                nodes = (
                    "one_node" if run.layout.gpus <= run.platform.gpus_per_node else "many_nodes"
                )
                mine[nodes].append(run.step_s / step_s(run, c))
            if run.memory_bytes:
                mine["memory"].append(run.memory_bytes / memory_bytes(run, c))
        for name in filter(mine.get, mine):
            ratios[name].append(mine[name])
    return {name: [_share(tables, 0.1), _share(tables, 0.9)] for name, tables in ratios.items()}


def _share(tables: list[list[float]], share: float) -> float:
    """The value below which this share of the entries lies, each table weighing the same."""
    weighed = sorted((value, 1 / len(table) / len(tables)) for table in tables for value in table)
    passed = 0.0
    for value, weight in weighed:
        passed += weight
        if passed >= share:
            return round(value, 3)
    return round(weighed[-1][0], 3)


def lines(boards: dict[str, list[Score]]) -> list[str]:
    """What README, lesson 11 and the planner's page say of the errors.
    An error that leaves out stalls has the error with them beside it."""
    whole = boards["left_out"][-1]
    stalled = [row for row in boards["left_out"][:-1] if row.stalls]
    sources = ", ".join(f"{row.stalls} of {row.timed:,} of {row.source}" for row in stalled)
    said = [
        f"{whole.timed:,} of {whole.runs:,} published runs have a step time, and "
        f"{whole.timed - whole.stalls:,} are scored. {sources} are left out: they took over "
        f"{STALL} times what constants fitted to all tables predict."
    ]
    for board, unseen in (
        ("left_out", "its own table"),
        ("program_left_out", "any run of its program"),
    ):
        *rows, whole = boards[board]
        steps = sorted(row.step_median_pct for row in rows)
        most = max(row.step_with_stalls_pct for row in rows)
        memory = sorted(row.memory_median_pct for row in rows if row.memory_runs)
        said.append(
            f"Each table predicted without {unseen}: step time {whole.step_median_pct:.1f} % off "
            f"in the median of {len(steps)} tables ({steps[0]:.1f} to {steps[-1]:.1f} %, to "
            f"{most:.1f} % with all runs), memory {whole.memory_median_pct:.1f} % in that of "
            f"{len(memory)} ({memory[0]:.1f} to {memory[-1]:.1f} %)."
        )
    far = [row for row in boards["left_out"][:-1] if row.step_median_pct > FAR_PCT]
    far.sort(key=lambda row: -row.step_median_pct)
    named = ", ".join(
        f"{row.source} {row.step_median_pct:.1f} % ({row.step_with_stalls_pct:.1f} % with all runs)"
        for row in far
    )
    return [
        *said,
        f"Without their own table these are more than {FAR_PCT} % off: {named or 'none'}.",
    ]


def reasons() -> list[str]:
    """Why the tables that are far off are far off, from their own rows."""
    return [_forge(), *_nanotron()]


def _forge() -> str:
    one, many = (run for run in runs("forge_frontier_throughput") if run.id.startswith("FORGE-M"))
    c = blind("forge_frontier_throughput")
    more = many.step_s - one.step_s
    nodes = many.layout.gpus / 8
    # both halves of tp, there and back, in 2 bytes
    gb = 2 * 2 * many.shape.parameters * (nodes - 1) / nodes / 1e9
    return (
        f"forge_frontier_throughput: FORGE-M takes {one.step_s:.1f} s on one node and "
        f"{many.step_s:.1f} s on {nodes:.0f}, with the same work on each GCD: {more:.1f} s more "
        f"(predicted {step_s(many, c) - step_s(one, c):.1f}), in which {gb:.0f} GB leave a node, "
        f"{gb / more:.0f} GB/s where its adapters carry 100."
    )


def _nanotron() -> list[str]:
    """By group: without any run of nanotron, and with its other model."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for half, model in HALVES.items():
        for run in runs("nanotron_sweep"):
            if run.step_s and run.model.startswith(model) and not is_stall(run):
                where = "tp in a node" if run.layout.tp <= 8 else "tp over nodes"
                tp = where if run.layout.tp > 1 else "tp 1"
                name = f"{tp}, {'a pipeline' if run.layout.pp > 1 else 'no pipeline'}"
                both = (step_s(run, blind(part)) / run.step_s for part in ("nanotron_sweep", half))
                groups[name].append(tuple(both))
    said = []
    for name, pairs in sorted(groups.items()):
        off = (
            100 * median(abs(ratio - 1) for ratio in ratios) for ratios in zip(*pairs, strict=True)
        )
        said.append(
            "nanotron_sweep, {}: {:.0f} % off without nanotron, "
            "{:.0f} % with its other model".format(name, *off)
        )
    return said


def _toml(said: list[str], ranges: dict[str, dict[str, list[float]]]) -> str:
    text = "# Written by `python benchmarks/planner/scoreboard.py --store`.\nlines = [\n"
    text += "".join(f"    {json.dumps(line)},\n" for line in said) + "]\n\n"
    text += "# Measured over predicted: 8 of 10 published runs lie between, "
    text += "each table weighing the same.\n[bands]\n"
    for program, rows in ranges.items():
        pairs = ", ".join(f"{name} = {values}" for name, values in rows.items())
        text += f"{program} = {{ {pairs} }}\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--json", action="store_true", help="print JSON, with the points and the court of lesson 11"
    )
    parser.add_argument(
        "--store", action="store_true", help="write that JSON, and its lines where they are shown"
    )
    boards = {"left_out": scoreboard(blind), "program_left_out": scoreboard(without_program)}
    boards |= {
        "one_model_left_out": halves(),
        "fitted_on_all": scoreboard(lambda source: CONSTANTS),
    }
    args = parser.parse_args()
    if not (args.json or args.store):
        for title, rows in zip(TITLES, boards.values(), strict=True):
            print(f"{title}\n{table(rows)}\n")
        print("\n".join([*lines(boards), "", *reasons(), "", NOTE]))
        return
    result = {
        "about": {"command": "python benchmarks/planner/scoreboard.py --store"},
        "lines": lines(boards),
    }
    result["reasons"] = reasons()
    result |= {name: [asdict(row) for row in rows] for name, rows in boards.items()}
    text = written(
        result | {"points": {source: points(source) for source in SOURCES}, "court": court()}
    )
    if args.json:
        print(text, end="")
    if args.store:
        STORED.write_text(text, encoding="utf-8")
        FOR_PLAN.write_text(_toml(result["lines"], bands()), encoding="utf-8")
        start, _, rest = README.read_text(encoding="utf-8").partition(MARKS[0])
        shown = "\n".join(f"- {line}" for line in result["lines"])
        README.write_text(
            f"{start}{MARKS[0]}\n{shown}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
