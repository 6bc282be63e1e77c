"""What Radius gains on a slow link, and where it does not: `aiscale bench radius`, on four new ranks.

    aiscale bench radius                              # wall clock of a step against dense and competitors
    aiscale bench radius --link shaped                # the same on nodes of their own, whose links the kernel slows
    aiscale bench radius --sweep --out FILE           # what it costs in perplexity: hours, goes on where it stopped

The link's rate is chosen so that a dense fp32 all-reduce after the backward pass takes the share of the step that it
took in the published baseline. Contenders take turns in the same processes (`radius_steps`), ratios are taken round by
round. A step of Radius is what one costs on average: T - 1 sparse ones and a dense one that chooses anew.

The saving that is asked for is over that same baseline, by the same kind of exchange, one message after the backward
pass. Against an all-reduce that is overlapped, or in bf16, there is less to save: that is measured too, and no check.
"""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from aiscale.bench.ddp import BenchError
from aiscale.bench.timing import machine_facts
from aiscale.config import ConfigError

RANKS = 4
SAVING_TARGET = 0.1855  #: published at density 0.4: of a whole run, over a dense all-reduce that is not overlapped
MASKING_TARGET = 0.15  #: of the all-reduce time that it saves, at most
HELD_TARGET = 5  #: bytes an entry: an fp32 residual and a byte of mask
DENSE_SHARE = 0.2  #: of the published run's steps came before the switch to Radius
BASELINES = ("dense, fp32, at once", "dense, fp32, overlapped", "dense, bf16, at once", "dense, bf16, overlapped")


def bench_radius(
    *,
    quick: bool = False,
    report: Callable[[str], None] = lambda message: None,
    sweep: bool = False,
    out: str | None = None,
    budget: float | None = None,
    link: str = "emulated",
) -> dict:
    """Steps, their parts, break-even densities and speed-ups; with `sweep`, perplexities (`radius_sweep`).

    link: emulated inside the ranks (`dist.link`), or shaped by the kernel (`bench.nodes`: Linux with namespaces).
    """
    if sweep:
        from aiscale.bench.radius.sweep import bench_sweep

        return bench_sweep(out=out, budget_min=budget, quick=quick, report=report)
    from aiscale.bench.radius.nodes import start_on_nodes, why_no_nodes
    from aiscale.distributed import launch

    if link == "shaped" and (why := why_no_nodes()):
        raise ConfigError(f"--link shaped: {why}; without --link it is emulated, which works anywhere")
    report(f"{RANKS} ranks, {link} links")
    with tempfile.TemporaryDirectory(prefix="aiscale-bench-") as folder:
        file = Path(folder) / "steps.json"
        start = functools.partial(start_on_nodes, timeout_s=3600) if link == "shaped" else launch
        status = start(RANKS, ["-m", "aiscale.bench.radius.steps", "quick" if quick else "full", link, str(file)])
        if status:
            raise BenchError(f"the ranks of bench radius ended with status {status}; what went wrong stands above")
        measured = json.loads(file.read_text())
    result = {**reckon(measured), "machine": machine_facts()}
    return {**result, "checks": [] if quick else checks(result)}


def reckon(measured: dict) -> dict:
    """From the seconds of every round to rows: what `radius_steps` measured -> what `bench_radius` returns."""
    from aiscale.bench.radius.steps import INTERVAL, SHARE

    sizes = measured["contenders"]
    seconds = _averaged(measured["seconds"], sizes, INTERVAL)
    rows = [_row(name, turns, seconds, sizes[name], measured) for name, turns in seconds.items()]
    facts = ("ranks", "parameters", "tokens", "rounds", "link", "link_mbit_s", "compute_s")
    return {
        **{fact: measured[fact] for fact in facts},
        "share": SHARE,
        "share_here": 1 - measured["compute_s"] / statistics.median(seconds[BASELINES[0]]),
        "interval": INTERVAL,
        "rows": rows,
        "masking": _masking(measured),
        "break_even": _break_even(seconds, sizes),
        "rates": _rates(measured, rows),
    }


def checks(result: dict) -> list[dict]:
    """What is asked for at density 0.4, in the published way: fp32, one all-reduce after the backward pass."""
    row = next(row for row in result["rows"] if row["name"] == "radius d 0.4, fp32, at once")
    dense = next(row for row in result["rows"] if row["name"] == BASELINES[0])
    masking = next(part for part in result["masking"] if part["name"] == row["name"])
    n = result["parameters"]
    asked = (
        (
            "saving of a run, a fifth of it dense, over dense at once, density 0.4",
            row["saving_with_switch"],
            SAVING_TARGET,
            False,
        ),
        ("masking over the all-reduce time saved", masking["share_of_saved"], MASKING_TARGET, True),
        ("bytes of mask and residual an entry", row["held_bytes"] / n, HELD_TARGET, True),
        (
            "bytes an entry by which a step's peak is above a dense one's",
            (row["peak_bytes"] - dense["peak_bytes"]) / n,
            HELD_TARGET,
            True,
        ),
    )
    return [
        {"name": name, "value": value, "target": target, "at_most": at_most, "met": _met(value, target, at_most)}
        for name, value, target, at_most in asked
    ]


def _met(value: float, target: float, at_most: bool) -> bool:
    return value <= target if at_most else value >= target


def _averaged(seconds: dict[str, list[float]], sizes: dict[str, dict], interval: int) -> dict[str, list[float]]:
    """Seconds of an average step: of Radius, (T - 1) times the sparse one's and the dense one's, over T.

    The dense step of one density stands for all of the same wire and overlap: it sends the same and chooses as many.
    """
    dense_turns = {name: turns for name, turns in seconds.items() if sizes[name]["dense_step"]}
    dense = {_way(sizes[name]): statistics.median(turns) for name, turns in dense_turns.items()}
    averaged = {}
    for name, turns in seconds.items():
        if sizes[name]["method"] == "radius" and not sizes[name]["dense_step"]:
            turns = [((interval - 1) * turn + dense[_way(sizes[name])]) / interval for turn in turns]
        averaged[name] = turns
    return averaged


def _way(contender: dict) -> tuple[str, bool]:
    return contender["wire"], contender["overlap"]


def _row(name: str, turns: list[float], seconds: dict[str, list[float]], sizes: dict, measured: dict) -> dict:
    saving = {
        base: _spread([1 - mine / theirs for mine, theirs in zip(turns, seconds[base], strict=True)])
        for base in BASELINES
        if base in seconds and base != name
    }
    step = _spread(turns)
    row = {"name": name, **sizes, "step_s": step, "one_step_s": _spread(measured["seconds"][name]), "saving": saving}
    if sizes["method"] == "radius" and BASELINES[0] in saving:
        row["saving_with_switch"] = (1 - DENSE_SHARE) * saving[BASELINES[0]]["median"]
    return row


def _spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": median, "low": low, "high": high}


def _masking(measured: dict) -> list[dict]:
    """What Radius's own work costs a sparse step, and the all-reduce time that it saves, both by themselves."""
    parts, found = measured["parts"], []
    dense_s = parts[f"all-reduce: {BASELINES[0]}"]
    for name, contender in measured["contenders"].items():
        if f"masking: {name}" not in parts:
            continue
        masking_s, sparse_s = parts[f"masking: {name}"], parts[f"all-reduce: {name}"]
        saved_s = statistics.median(a - b for a, b in zip(dense_s, sparse_s, strict=True))
        own_s = statistics.median(masking_s)
        found.append(
            {
                "name": name,
                "density": contender["density"],
                "masking_s": _spread(masking_s),
                "masking_ns_per_entry": 1e9 * own_s / measured["parameters"],
                "all_reduce_s": _spread(sparse_s),
                "saved_s": saved_s,
                "share_of_saved": own_s / saved_s if saved_s > 0 else float("inf"),
            }
        )
    return found


def _break_even(seconds: dict[str, list[float]], sizes: dict[str, dict]) -> list[dict]:
    """The density at which Radius takes as long as a baseline, on the line through its steps at all densities, round by
    round; None where more than a quarter of the rounds have a line that does not rise."""
    published = {
        name: c for name, c in sizes.items() if c["method"] == "radius" and not (c["dense_step"] or c["turns"])
    }
    found = []
    for way in dict.fromkeys(map(_way, published.values())):
        names = [name for name, contender in published.items() if _way(contender) == way]
        densities = [published[name]["density"] for name in names]
        turns = zip(*(seconds[name] for name in names), strict=True)
        lines = [statistics.linear_regression(densities, times) for times in turns]
        rises = _spread([line.slope for line in lines])["low"] > 0
        for base in (base for base in BASELINES if base in seconds):
            pairs = zip(lines, seconds[base], strict=True)
            density = _spread([(s - line.intercept) / line.slope for line, s in pairs]) if rises else None
            found.append({"wire": way[0], "overlap": way[1], "over": base, "density": density})
    return found


def _rates(measured: dict, rows: list[dict]) -> list[dict]:
    """Sparse steps at other rates, and how many times as fast as the dense all-reduce at once they are."""
    names = next(iter(measured["at_rates"].values()), {})
    main = {name: measured["seconds"][name] for name in names}
    at_rates = {**measured["at_rates"], "1.0": main}
    found = []
    for factor, seconds in sorted(at_rates.items(), key=lambda item: float(item[0])):
        for name, turns in seconds.items():
            ratios = [base / mine for mine, base in zip(turns, seconds[BASELINES[0]], strict=True)]
            found.append(
                {
                    "link_mbit_s": float(factor) * measured["link_mbit_s"],
                    "times_main_rate": float(factor),
                    "name": name,
                    "step_s": _spread(turns),
                    "speedup": _spread(ratios),
                }
            )
    return found
