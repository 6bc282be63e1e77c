"""How much Radius gains on a slow link: steps of four ranks against dense ones and competitors.

    python benchmarks/radius.py [--quick] [--json]      # a quarter of an hour, alone on the machine

All ways to send gradients (ways.py; Radius is the trainer's) take turns in the same processes, over
links that `aiscale.measure.distributed.link` slows. Their rate is chosen so that a dense all-reduce
after the backward pass takes the same share of the step as in the published baseline; ratios are
taken round by round. The time of a Radius step is an average: T - 1 sparse steps and one dense step
that refreshes the mask. An all-reduce alone, and Radius's own work on a gradient alone, are
measured too, and some contenders at other rates. The cost in perplexity is trained by
`radius_sweep.py`, in a day.

The target for the saving refers to that baseline: one message after the backward pass. An
all-reduce that is overlapped, or in bf16, leaves less to save: that is measured too, but not
checked.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from common import (
    SHARE,
    Paired,
    arguments,
    as_rank,
    check,
    finish,
    machine_facts,
    on_ranks,
    paired,
    table,
)
from torch.nn.parallel import DistributedDataParallel
from ways import Bucket, make

from aiscale.measure.distributed import World
from aiscale.measure.distributed.link import FRAMING
from aiscale.measure.meter import held_bytes, step_peak_bytes
from aiscale.plan import cost
from aiscale.plan.published.reader import DENSE_SHARE
from aiscale.train import radius as trainer
from aiscale.train.model import build, draw, loss_of
from aiscale.train.optimizer import make_optimizer
from aiscale.train.options import options

RANKS = 4
DENSITIES = (0.9, 0.5, 0.4, 0.1)
INTERVAL = 200  #: published; here it only decides how much the dense step counts
#: published days at density 0.4 and with a dense all-reduce that is not overlapped
SAVING_TARGET = 1 - 5.43 / 6.44
MASKING_TARGET = 0.15  #: at most, of the all-reduce time saved
HELD_TARGET = 5  #: bytes per entry: an fp32 residual and a byte of mask
BASELINES = (
    "dense, fp32, at once",
    "dense, fp32, overlapped",
    "dense, bf16, at once",
    "dense, bf16, overlapped",
)
SILENT = "no communication"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to send the gradients of a step."""

    method: str
    wire: str = "same"
    overlap: bool = True
    density: float = 1.0
    dense_step: bool = False  #: the dense step of Radius, with residual and refresh
    rank: int = 0  #: of PowerSGD's factors

    @property
    def name(self) -> str:
        detail = (
            f" d {self.density:g}"
            if self.density < 1
            else f" rank {self.rank}"
            if self.rank
            else ""
        )
        method = "dense" if self.method == "none" else self.method
        dense = ", dense step" if self.dense_step else ""
        wire = "bf16" if self.wire == "bf16" else "fp32"
        return f"{method}{detail}{dense}, {wire}, {'overlapped' if self.overlap else 'at once'}"

    def way(self, model):
        """Its hook for DDP, or None: DDP alone."""
        if (self.method, self.wire) == ("none", "same"):
            return None
        about = {
            "density": self.density,
            "interval": 10**9,
            "rank": self.rank,
            "bf16": self.wire == "bf16",
        }
        return make(self.method, model, **about)


BASELINE = Contender(method="none", overlap=False)
WAYS = tuple(
    {"wire": wire, "overlap": overlap} for wire in ("same", "bf16") for overlap in (False, True)
)


def plan(quick: bool) -> tuple[tuple[str, ...], tuple[Contender, ...], int, tuple[float, ...]]:
    """(options, contenders, rounds, multiples of the main rate for some); quick: a smoke test."""
    dense = tuple(Contender(method="none", **way) for way in WAYS)
    ways, densities = ((WAYS[0],), (0.9, 0.1)) if quick else (WAYS, DENSITIES)
    radius = tuple(Contender(method="radius", density=d, **way) for way in ways for d in densities)
    refresh = tuple(
        Contender(method="radius", density=radius[-1].density, dense_step=True, **way)
        for way in ways
    )
    if quick:
        shape = ("--model=1x32", "--length=32", "--batch=8")
        return shape, (*dense[:2], *radius, *refresh), 2, (0.5,)
    shape = ("--model=3x192", "--length=128", "--batch=32")
    # At 4 ranks an all-gather of k values and indices sends as much as an all-reduce of 4 k values.
    rivals = (
        Contender(method="top-k", density=0.1),
        Contender(method="powersgd", rank=4),
        # the largest that sends at most 0.4 of the gradients
        Contender(method="powersgd", rank=51),
    )
    return shape, (*dense, *radius, *refresh, *rivals), 12, (0.125, 0.25, 0.5, 2.0, 4.0, 8.0)


class Trained:
    """One rank's model under DDP, and its way to send gradients."""

    def __init__(self, contender: Contender, args: argparse.Namespace) -> None:
        model = draw(build(args), args, torch.device("cpu"))
        self.optimizer, self.way = make_optimizer(model, args), contender.way(model)
        # One bucket goes after the backward pass. torch's PowerSGD needs one; the others get
        # several, so that there is something to overlap.
        bucket_mb = 0.5 if contender.overlap and not contender.rank else 1000
        self.module = DistributedDataParallel(
            model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb
        )
        if self.way:
            self.module.register_comm_hook(None, self.way.hook)

    def step(self, rows: torch.Tensor) -> None:
        loss_of(self.module(rows[:, :-1]), rows[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        if self.way:
            self.way.after_step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=False)  # so that DDP's buckets can be seen

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        parameters = list(self.module.parameters())
        states = [each for state in self.optimizer.state.values() for each in state.values()]
        return {
            "parameters": parameters,
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer states": states,
            "compression": self.way.tensors() if self.way else [],
        }


class Arrived:
    """A collective that has ended at once."""

    def __init__(self, message: torch.Tensor) -> None:
        self.future = torch.futures.Future()
        self.future.set_result([message])

    def get_future(self) -> torch.futures.Future:
        return self.future


class Bench:
    """One rank's models, one per contender, and its link."""

    def __init__(
        self, world: World, shape: tuple[str, ...], contenders: tuple[Contender, ...]
    ) -> None:
        self.world = world
        self.args = options().parse_args(shape)
        self.trained: dict[Contender, Trained] = {}
        for contender in (BASELINE, *contenders):
            if (key := replace(contender, dense_step=False)) not in self.trained:
                self.trained[key] = Trained(key, self.args)
        numbers = torch.Generator().manual_seed(world.rank)
        size = (self.args.batch // world.size, self.args.length + 1)
        self.rows = torch.randint(0, 256, size, generator=numbers)
        for each in self.trained.values():
            for _ in range(3):  # DDP rebuilds its buckets, PowerSGD starts at its third step
                each.step(self.rows)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.trained[BASELINE].module.parameters())

    def slow_down(self, rate_mbit_s: float) -> None:
        self.world.link.rate_mbit_s = rate_mbit_s
        self.world.barrier()

    def turns(self, actions: dict[str, Callable[[], object]], rounds: int) -> Paired:
        """`paired` on all ranks: a turn lasts until the slowest rank has finished."""

        def together(action: Callable[[], object]) -> None:
            action()
            self.world.barrier()

        return paired({name: partial(together, action) for name, action in actions.items()}, rounds)

    def step(self, contender: Contender) -> None:
        trained = self.trained[replace(contender, dense_step=False)]
        if contender.method == "radius":  # its first step is dense, all others are sparse
            trained.way.step = 0 if contender.dense_step else 1
        trained.step(self.rows)

    def silent(self) -> None:
        """The baseline's step without its all-reduce."""
        trained = self.trained[BASELINE]
        with trained.module.no_sync():
            trained.step(self.rows)

    def rate_mbit_s(self, steps: dict[str, Callable[[], object]], rounds: int) -> float:
        """The rate at which the baseline's all-reduce takes SHARE of its step; leaves links at it.

        The first guess counts bytes. On busy processors an all-reduce takes longer than that, so
        the rate is corrected twice, by times measured among all contenders (`steps`).
        """
        compute_s = self.turns({SILENT: self.silent}, max(3, rounds)).median_s(SILENT)
        nbytes = cost.wire_bytes("all_reduce", 4 * self.parameters, self.world.size)
        rate = nbytes * FRAMING * 8 / (compute_s * SHARE / (1 - SHARE)) / 1e6
        for _ in range(2):
            self.slow_down(rate := self.world.from_rank0(lambda rate=rate: rate))
            timed = self.turns(steps, max(2, rounds // 2))
            compute_s, taken_s = timed.median_s(SILENT), timed.median_s(BASELINE.name)
            rate *= min(max((taken_s - compute_s) / (compute_s * SHARE / (1 - SHARE)), 0.5), 2)
        rate = self.world.from_rank0(lambda: rate)
        self.slow_down(rate)
        return rate

    def sizes(self, contender: Contender) -> dict[str, int]:
        """Bytes of one step: payload of the collectives, and sent by one rank on a ring.
        Then held by the compressor from step to step, and at its peak."""
        before = self.world.traffic.snapshot()
        self.step(contender)
        counts = self.world.traffic.since(before)
        wire = sum(cost.wire_bytes(op, count.payload_bytes, n) for (op, n), count in counts.items())

        def step() -> None:
            self.step(contender)

        held = self.trained[replace(contender, dense_step=False)].tensors
        return {
            "payload_bytes": sum(count.payload_bytes for count in counts.values()),
            "wire_bytes": round(wire),
            "held_bytes": held_bytes(held()).get("compression", 0),
            "peak_bytes": sum(step_peak_bytes(step, held, self.world.device).values()),
        }

    def masking(self, contender: Contender) -> Callable[[], None]:
        """Radius's work on gradients in a sparse step, without sending: select, unpack, keep."""
        trained = self.trained[contender]
        model, way = trained.module.module, trained.way
        loss_of(model(self.rows[:, :-1]), self.rows[:, 1:]).backward()
        bucket = Bucket(model.parameters())
        trained.optimizer.zero_grad(set_to_none=False)
        nothing_sent = SimpleNamespace(all_reduce=lambda message, **_: Arrived(message))

        def alone() -> None:
            with patch.object(trainer, "dist", nothing_sent):
                way.step = 1
                way.hook(None, bucket).wait()

        return alone


def measure(world: World, quick: bool) -> dict:
    """Seconds of every turn and bytes of every contender; ranks agree, but for clock readings."""
    torch.set_num_threads(1)
    shape, contenders, rounds, factors = plan(quick)
    bench = Bench(world, shape, contenders)
    sizes = {c.name: bench.sizes(c) for c in contenders}
    steps = {SILENT: bench.silent, **{c.name: partial(bench.step, c) for c in contenders}}
    rate = bench.rate_mbit_s(steps, rounds)
    timed = bench.turns(steps, rounds)
    parts = bench.turns(_parts(bench, contenders, sizes), rounds)
    few = [
        c
        for c in contenders
        if not c.dense_step and (c.method == "none" or c.density in (0.4, 0.1))
    ]
    few = [c for c in few if c.method in ("none", "radius") and (c.overlap or c.wire == "same")]
    at_rates = {}
    for factor in factors:
        bench.slow_down(rate * factor)
        at_rates[str(factor)] = bench.turns(
            {c.name: steps[c.name] for c in few}, max(2, rounds // 2)
        ).seconds
    return {
        "ranks": world.size,
        "parameters": bench.parameters,
        "tokens": bench.args.batch * bench.args.length,
        "rounds": rounds,
        "link": "emulated",
        "link_mbit_s": rate,
        "compute_s": timed.median_s(SILENT),
        "contenders": {c.name: {**asdict(c), **sizes[c.name]} for c in contenders},
        "seconds": {name: seconds for name, seconds in timed.seconds.items() if name != SILENT},
        "parts": parts.seconds,
        "at_rates": at_rates,
    }


def _parts(
    bench: Bench, contenders: tuple[Contender, ...], sizes: dict
) -> dict[str, Callable[[], object]]:
    """Parts of a step alone: the all-reduce of each size, and Radius's own work at each density."""
    actions: dict[str, Callable[[], object]] = {}
    for contender in contenders:
        if contender.overlap or contender.wire != "same" or contender.dense_step:
            continue
        buffer = torch.zeros(sizes[contender.name]["payload_bytes"] // 4)
        actions[f"all-reduce: {contender.name}"] = lambda buffer=buffer: dist.all_reduce(buffer)
        if contender.method == "radius":
            actions[f"masking: {contender.name}"] = bench.masking(contender)
    return actions


def reckon(measured: dict) -> dict:
    """What `measure` returned (seconds of every round) as steps, their parts and speed-ups."""
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
    """The targets at density 0.4, with the published settings.
    These are fp32, and one all-reduce after the backward pass."""
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
        check(
            "bytes an entry by which a step's peak is above a dense one's", more / n, HELD_TARGET
        ),
    ]


def _averaged(seconds: dict[str, list[float]], sizes: dict[str, dict]) -> dict[str, list[float]]:
    """Seconds of an average step; for Radius, ((T - 1) sparse + dense) / T.

    The dense step is measured at one density and used for all with the same wire format and
    overlap: it sends the same bytes and selects from as many entries.
    """
    dense_turns = {name: turns for name, turns in seconds.items() if sizes[name]["dense_step"]}
    dense = {_way(sizes[name]): statistics.median(turns) for name, turns in dense_turns.items()}
    averaged = {}
    for name, turns in seconds.items():
        if sizes[name]["method"] == "radius" and not sizes[name]["dense_step"]:
            turns = [
                ((INTERVAL - 1) * turn + dense[_way(sizes[name])]) / INTERVAL for turn in turns
            ]
        averaged[name] = turns
    return averaged


def _way(contender: dict) -> tuple[str, bool]:
    return contender["wire"], contender["overlap"]


def _row(
    name: str, turns: list[float], seconds: dict[str, list[float]], sizes: dict, measured: dict
) -> dict:
    saving = {
        base: _spread(
            [1 - mine / theirs for mine, theirs in zip(turns, seconds[base], strict=True)]
        )
        for base in BASELINES
        if base in seconds and base != name
    }
    step = _spread(turns)
    row = {
        "name": name,
        **sizes,
        "step_s": step,
        "one_step_s": _spread(measured["seconds"][name]),
        "saving": saving,
    }
    if sizes["method"] == "radius" and BASELINES[0] in saving:
        row["saving_with_switch"] = (1 - DENSE_SHARE) * saving[BASELINES[0]]["median"]
    return row


def _spread(values: list[float]) -> dict[str, float]:
    low, median, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    )
    return {"median": median, "low": low, "high": high}


def _masking(measured: dict) -> list[dict]:
    """Radius's own work in a sparse step, and the all-reduce time it saves, each measured alone."""
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
        found.append(
            {**row, "all_reduce_s": _spread(sparse_s), "saved_s": saved_s, "share_of_saved": share}
        )
    return found


def _rates(measured: dict) -> list[dict]:
    """Sparse steps at other rates, and their speed-up over the dense all-reduce of one message."""
    names = next(iter(measured["at_rates"].values()), {})
    at_rates = {float(factor): seconds for factor, seconds in measured["at_rates"].items()}
    at_rates[1.0] = {name: measured["seconds"][name] for name in names}
    found = []
    for factor, seconds in sorted(at_rates.items()):
        rate = {"link_mbit_s": factor * measured["link_mbit_s"], "times_main_rate": factor}
        for name, turns in seconds.items():
            ratios = [base / mine for mine, base in zip(turns, seconds[BASELINES[0]], strict=True)]
            found.append(
                {**rate, "name": name, "step_s": _spread(turns), "speedup": _spread(ratios)}
            )
    return found


def show(result: dict) -> None:
    """Print each step; what its parts and other rates take is in the JSON, which figures draw."""
    print(
        f"{result['ranks']} ranks, {result['parameters']:,} parameters, {result['tokens']} tokens "
        f"a step, {result['rounds']} rounds; {result['link']} link of "
        f"{result['link_mbit_s']:.1f} Mbit/s, where the exchange takes {result['share_here']:.1%} "
        f"of a dense step (published: {result['share']:.1%})"
    )
    bases = [base for base in BASELINES if any(row["name"] == base for row in result["rows"])]
    rows = [
        (
            row["name"],
            f"{row['step_s']['median']:.3f}",
            f"{row['step_s']['low']:.3f} to {row['step_s']['high']:.3f}",
            *(f"{row[key] / 1e6:.2f} MB" for key in ("payload_bytes", "wire_bytes", "peak_bytes")),
            *(
                f"{row['saving'][base]['median']:+.1%}" if base in row["saving"] else ""
                for base in bases
            ),
        )
        for row in result["rows"]
    ]
    title = (
        f"a step; of radius, {result['interval'] - 1} sparse ones and a dense one; "
        "time saved over each baseline"
    )
    table(title, ("", "s", "quartiles", "payload", "sent", "peak", *bases), rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        as_rank(measure)
    else:
        args = arguments(__doc__).parse_args()
        result = {**reckon(on_ranks(RANKS, __file__, args.quick)), "machine": machine_facts()}
        raise SystemExit(
            finish({**result, "checks": [] if args.quick else checks(result)}, show, args.json)
        )
