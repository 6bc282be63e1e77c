"""How much Radius gains on a slow link: `aiscale bench radius`, on four new ranks.

    aiscale bench radius                              # wall clock of a step against dense and competitors
    aiscale bench radius --link shaped                # the same on virtual nodes, whose links the kernel slows

Its cost in perplexity is trained by scripts/radius_sweep.py, in a day.

The link's rate is chosen so that a dense fp32 all-reduce after the backward pass takes the same share of the step as in
the published baseline. Contenders take turns in the same processes (`steps`); ratios are taken round by round. The
time of a Radius step is an average: T - 1 sparse steps and one dense step that refreshes the mask.

The target for the saving refers to that baseline: one message after the backward pass. An all-reduce that is
overlapped, or in bf16, leaves less to save: that is measured too, but not checked.
"""

from __future__ import annotations

import functools
import statistics

from aiscale.bench.nodes import start_on_nodes, why_no_nodes
from aiscale.bench.radius.steps import INTERVAL, SHARE
from aiscale.bench.ranks import Report, on_ranks, silent
from aiscale.bench.tables import check, checks_table, heading, table
from aiscale.bench.timing import machine_facts
from aiscale.config import ConfigError
from aiscale.published.reader import DENSE_SHARE

RANKS = 4
SAVING_TARGET = 1 - 5.43 / 6.44  #: published days at density 0.4 and with a dense all-reduce that is not overlapped
MASKING_TARGET = 0.15  #: at most, of the all-reduce time saved
HELD_TARGET = 5  #: bytes per entry: an fp32 residual and a byte of mask
BASELINES = ("dense, fp32, at once", "dense, fp32, overlapped", "dense, bf16, at once", "dense, bf16, overlapped")


def bench_radius(*, quick: bool = False, report: Report = silent, link: str = "emulated") -> dict:
    """Steps, their parts and speed-ups.

    link: emulated inside the ranks (`distributed.link`), or shaped by the kernel (`nodes`: Linux with namespaces).
    """
    if link == "shaped" and (why := why_no_nodes()):
        raise ConfigError(f"--link shaped: {why}; without --link it is emulated, which works anywhere")
    report(f"{RANKS} ranks, {link} links")
    start = functools.partial(start_on_nodes, timeout_s=3600) if link == "shaped" else None
    measured = on_ranks(RANKS, "aiscale.bench.radius.steps:measure", quick, link, start=start)
    result = {**reckon(measured), "machine": machine_facts()}
    return {**result, "checks": [] if quick else checks(result)}


def reckon(measured: dict) -> dict:
    """Turn what `steps.measure` returned (seconds of every round) into the rows of `bench_radius`."""
    sizes = measured["contenders"]
    seconds = _averaged(measured["seconds"], sizes)
    rows = [_row(name, turns, seconds, sizes[name], measured) for name, turns in seconds.items()]
    facts = ("ranks", "parameters", "tokens", "rounds", "link", "link_mbit_s", "compute_s")
    return {
        **{fact: measured[fact] for fact in facts},
        "share": SHARE,
        "share_here": 1 - measured["compute_s"] / statistics.median(seconds[BASELINES[0]]),
        "interval": INTERVAL,
        "rows": rows,
        "masking": _masking(measured),
        "rates": _rates(measured),
    }


def checks(result: dict) -> list[dict]:
    """The targets at density 0.4, with the published settings: fp32, one all-reduce after the backward pass."""
    row = next(row for row in result["rows"] if row["name"] == "radius d 0.4, fp32, at once")
    dense = next(row for row in result["rows"] if row["name"] == BASELINES[0])
    masking = next(part for part in result["masking"] if part["name"] == row["name"])
    n = result["parameters"]
    saved = "saving of a run, a fifth of it dense, over dense at once, density 0.4"
    more = row["peak_bytes"] - dense["peak_bytes"]
    return [
        check(saved, row["saving_with_switch"], SAVING_TARGET, at_most=False),
        check("masking over the all-reduce time saved", masking["share_of_saved"], MASKING_TARGET),
        check("bytes of mask and residual an entry", row["held_bytes"] / n, HELD_TARGET),
        check("bytes an entry by which a step's peak is above a dense one's", more / n, HELD_TARGET),
    ]


def _averaged(seconds: dict[str, list[float]], sizes: dict[str, dict]) -> dict[str, list[float]]:
    """Seconds of an average step; for Radius, ((T - 1) sparse + dense) / T.

    The dense step is measured at one density and used for all with the same wire format and overlap: it sends the same
    bytes and selects from as many entries.
    """
    dense_turns = {name: turns for name, turns in seconds.items() if sizes[name]["dense_step"]}
    dense = {_way(sizes[name]): statistics.median(turns) for name, turns in dense_turns.items()}
    averaged = {}
    for name, turns in seconds.items():
        if sizes[name]["method"] == "radius" and not sizes[name]["dense_step"]:
            turns = [((INTERVAL - 1) * turn + dense[_way(sizes[name])]) / INTERVAL for turn in turns]
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
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": median, "low": low, "high": high}


def _masking(measured: dict) -> list[dict]:
    """Cost of Radius's own work in a sparse step, and the all-reduce time that it saves, each measured alone."""
    parts, found = measured["parts"], []
    dense_s = parts[f"all-reduce: {BASELINES[0]}"]
    for name, contender in measured["contenders"].items():
        if f"masking: {name}" not in parts:
            continue
        masking_s, sparse_s = _spread(parts[f"masking: {name}"]), parts[f"all-reduce: {name}"]
        saved_s = statistics.median(a - b for a, b in zip(dense_s, sparse_s, strict=True))
        row = {"name": name, "density": contender["density"], "masking_s": masking_s}
        row["masking_ns_per_entry"] = 1e9 * masking_s["median"] / measured["parameters"]
        share = masking_s["median"] / saved_s if saved_s > 0 else float("inf")
        found.append({**row, "all_reduce_s": _spread(sparse_s), "saved_s": saved_s, "share_of_saved": share})
    return found


def _rates(measured: dict) -> list[dict]:
    """Sparse steps at other rates, and their speed-up over the dense all-reduce that is not overlapped."""
    names = next(iter(measured["at_rates"].values()), {})
    at_rates = {float(factor): seconds for factor, seconds in measured["at_rates"].items()}
    at_rates[1.0] = {name: measured["seconds"][name] for name in names}
    found = []
    for factor, seconds in sorted(at_rates.items()):
        rate = {"link_mbit_s": factor * measured["link_mbit_s"], "times_main_rate": factor}
        for name, turns in seconds.items():
            ratios = [base / mine for mine, base in zip(turns, seconds[BASELINES[0]], strict=True)]
            found.append({**rate, "name": name, "step_s": _spread(turns), "speedup": _spread(ratios)})
    return found


# Tables --------------------------------------------------------------------------------------------------------------


def show_radius(result: dict) -> None:
    """Print each step; what its parts and other rates take is in the JSON, which figures draw."""
    facts = f"{result['ranks']} ranks, {result['parameters']:,} parameters, {result['tokens']} tokens a step, "
    link = f"{result['link']} link of {result['link_mbit_s']:.1f} Mbit/s, where the exchange takes "
    link += f"{result['share_here']:.1%} of a dense step (published: {result['share']:.1%})"
    heading(result, f"{facts}{result['rounds']} rounds; {link}")
    bases = [base for base in BASELINES if any(row["name"] == base for row in result["rows"])]
    rows = [
        (
            row["name"],
            f"{row['step_s']['median']:.3f}",
            f"{row['step_s']['low']:.3f} to {row['step_s']['high']:.3f}",
            *(f"{row[key] / 1e6:.2f} MB" for key in ("payload_bytes", "wire_bytes", "peak_bytes")),
            *(f"{row['saving'][base]['median']:+.1%}" if base in row["saving"] else "" for base in bases),
        )
        for row in result["rows"]
    ]
    title = f"a step; of radius, {result['interval'] - 1} sparse ones and a dense one; time saved over each baseline"
    table(title, ("", "s", "quartiles", "payload", "sent", "peak", *bases), rows)
    checks_table(result["checks"])
