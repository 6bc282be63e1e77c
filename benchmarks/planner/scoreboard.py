"""How far `aiscale plan` is from two thousand published runs: step time, memory, what fits, which layout is faster.

    python benchmarks/planner/scoreboard.py            # three tables, in five seconds
    python benchmarks/planner/scoreboard.py --json > src/aiscale/published/measured/planner.json

The second adds every point and the runs of the memory court, and stores them for lesson 11.

The first table predicts each source (a published table, see `runs`) with constants that were fitted without it, the
second each model of the large sweep with constants that were fitted without that model, the third all of them with
the constants of the package.

A *stall* is a run measured at over 2.5 times what the package's constants predict: in nanotron's sweep a fifth of the
runs, mostly pipelines, waits about a second a micro-batch whatever the work, and exact repeats differ by up to 400 %.
Stalls are counted, never fitted, and left out of the errors; a column of its own gives the error with them.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace

from runs import SOURCES, Run, runs
from scipy.stats import spearmanr

from aiscale.config import ConfigError
from aiscale.plan.answer import predict
from aiscale.plan.constants import CONSTANTS, constants
from aiscale.plan.memory import fits, peak_bytes
from aiscale.plan.step import step_seconds

LEFT_OUT = Path(__file__).parent / "left_out.json"  #: {what was left out: the constants fitted without it}
#: The two models of the large sweep, to leave out one and keep the other: no other source has a host-bound pipeline.
HALVES = {"nanotron_sweep 1B": "16 layers", "nanotron_sweep 8B": "32 layers"}
STALL = 2.5
LEAST_RANKED = 5  #: layouts of one model that are worth ranking
NOTE = (
    "step, memory: median and mean |predicted / measured - 1| in %; stalls: runs over 2.5 times what the package's\n"
    "constants predict, left out of step and mean, counted in `stalls in`; ran fit, crash not: share of runs that ran\n"
    "and were predicted to fit, of crashed ones predicted not to; rank: Spearman's correlation of layouts of one model."
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


def blind(source: str) -> SimpleNamespace:
    """The constants fitted without this source, or half of the sweep."""
    return constants(**json.loads(LEFT_OUT.read_text())[source])


def scoreboard(left_out: bool = True) -> list[Score]:
    """One row a source, then those pooled over the runs of all sources but the large sweep, and of all."""
    parts = {source: _errors(runs(source), blind(source) if left_out else CONSTANTS) for source in SOURCES}
    rows = [_score(source, [errors]) for source, errors in parts.items()]
    others = [errors for source, errors in parts.items() if source != "nanotron_sweep"]
    return [*rows, _score("all but nanotron's sweep", others), _score("overall", list(parts.values()))]


def halves() -> list[Score]:
    """Each model of the large sweep, predicted by constants that saw the other model and all other sources."""
    sweep = runs("nanotron_sweep")
    chosen = {half: [run for run in sweep if run.model.startswith(model)] for half, model in HALVES.items()}
    return [_score(half, [_errors(rows, blind(half))]) for half, rows in chosen.items()]


def _errors(chosen: Iterable[Run], c: SimpleNamespace) -> dict[str, list]:
    """What these runs add to a score: errors, whether each would run, (rank correlation, layouts) of models."""
    errors: dict[str, list] = {name: [] for name in ("ran", "crashed", "step", "all steps", "memory", "ranks")}
    layouts: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for run in chosen:
        errors["ran" if run.ran else "crashed"].append(would_run(run, c))
        if run.memory_bytes:
            predicted = peak_bytes(run.shape, run.layout, c, 0 if run.first_stage else None)
            errors["memory"].append(abs(predicted / run.memory_bytes - 1))
        if run.step_s:
            predicted = step_s(run, c)
            errors["all steps"].append(abs(predicted / run.step_s - 1))
            if not is_stall(run):
                errors["step"].append(errors["all steps"][-1])
                layouts[run.model].append((predicted, run.step_s))
    ranked = [pairs for pairs in layouts.values() if len(pairs) >= LEAST_RANKED]
    errors["ranks"] = [(spearmanr(*zip(*pairs, strict=True)).statistic, len(pairs)) for pairs in ranked]
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


def is_stall(run: Run) -> bool:
    return bool(run.step_s) and run.step_s > STALL * step_s(run, CONSTANTS)


def _score(source: str, parts: list[dict[str, list]]) -> Score:
    def joined(name: str) -> list:
        return [value for part in parts for value in part[name]]

    def percent(values: list, middle) -> float | None:
        return round(100 * middle(values), 1) if values else None

    step, every, memory, ranks = (joined(name) for name in ("step", "all steps", "memory", "ranks"))
    ran, crashed = joined("ran"), joined("crashed")
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
        rank_correlation=round(float(sum(r * n for r, n in ranks) / sum(n for _, n in ranks)), 3) if ranks else None,
    )


# For lesson 11 --------------------------------------------------------------------------------------------------------


def points(source: str) -> dict[str, list]:
    """Every timed run but the stalls: seconds of a step, and whether tensor parallelism stays inside a node."""
    timed = [run for run in runs(source) if run.step_s and not is_stall(run)]
    return {
        "published_s": [_digits(run.step_s) for run in timed],
        "predicted_s": [_digits(step_s(run, blind(source))) for run in timed],
        "tp_in_node": [run.layout.tp <= run.platform.gpus_per_node for run in timed],
    }


def court() -> list[dict]:
    """Runs of the sweep close to what a device holds, and whether they would run, by constants fitted without it."""
    c, rows = blind("nanotron_sweep"), []
    for run in runs("nanotron_sweep"):
        shape, layout = run.shape, run.layout
        pieces = layout.pp * layout.virtual_stages
        if pieces <= shape.layers and 0.6 < predict(shape, layout, run.platform, c).memory_gb / 75 < 1.7:
            row = {"parameters_B": _digits(shape.parameters / 1e9), "layers": shape.layers, "hidden": shape.hidden}
            row |= {name: getattr(layout, name) for name in ("gpus", "dp", "tp", "pp", "zero_stage", "micro_batches")}
            row["micro_batch_tokens"] = layout.micro_batch * shape.seq
            rows.append(row | {"ran": run.ran, "predicted_to_run": would_run(run, c)})
    return rows


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


# The command ----------------------------------------------------------------------------------------------------------


def table(rows: list[Score]) -> str:
    titles = ("runs", "stalls", "step", "mean", "stalls in", "memory", "mean", "ran fit", "crash not", "rank")
    lines = [f"{'median |error| in %':34}" + "".join(f"{title:>10}" for title in titles)]
    for row in rows:
        cells = (
            row.runs, row.stalls, row.step_median_pct, row.step_mean_pct, row.step_with_stalls_pct,
            row.memory_median_pct, row.memory_mean_pct, row.ran_predicted_to_fit_pct, row.crashed_predicted_not_to_pct,
            row.rank_correlation,
        )  # fmt: skip
        lines.append(f"{row.source:34}" + "".join(f"{'-' if cell is None else cell:>10}" for cell in cells))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON, with the points and the court of lesson 11")
    boards = {"left_out": scoreboard(), "one_model_left_out": halves(), "fitted_on_all": scoreboard(left_out=False)}
    if parser.parse_args().json:
        result = {"about": {"command": "python benchmarks/planner/scoreboard.py --json"}}
        result |= {name: [asdict(row) for row in rows] for name, rows in boards.items()}
        print(written(result | {"points": {source: points(source) for source in SOURCES}, "court": court()}), end="")
        return
    print("constants fitted without the source that they predict\n" + table(boards["left_out"]))
    print("\none model of the large sweep left out, the other kept\n" + table(boards["one_model_left_out"]))
    print("\nconstants of the package, fitted on all sources\n" + table(boards["fitted_on_all"]) + f"\n\n{NOTE}")


if __name__ == "__main__":
    main()
