"""The ranks of `aiscale bench radius`: all ways to send gradients take turns in the same processes.

    measured = on_ranks(4, "aiscale.bench.radius.steps:measure", quick, "emulated")      # as `study` does

It measures the time of a step without communication, from which it derives the link's rate; each contender's step at
that rate and the bytes it sends; an all-reduce alone, and Radius's own work on a gradient alone; some contenders also
at other rates. `study` computes savings from it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from aiscale import cost
from aiscale.bench.nodes import shape
from aiscale.bench.ranks import random_batch, turns, without_sending
from aiscale.distributed import World
from aiscale.distributed.link import FRAMING
from aiscale.meter import held_bytes, step_peak_bytes
from aiscale.parallel import build
from aiscale.parallel.serial import Engine
from aiscale.recipes import recipe

SHARE = 0.9 / 1.855  #: share of a step that the all-reduce takes in the published baseline: seconds, a fit of its table
SILENT = "no communication"
DENSITIES = (0.9, 0.5, 0.4, 0.1)
INTERVAL = 200  #: published; here it only decides how much the dense step counts


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to send the gradients of a step."""

    method: str
    wire: str = "same"
    overlap: bool = True
    density: float = 1.0
    dense_step: bool = False  #: the dense step of Radius, with residual and refresh
    rank: int = 0  #: of PowerSGD's factors
    turns: int = 0  #: of Radius, with delayed moments

    @property
    def name(self) -> str:
        detail = f" d {self.density:g}" if self.density < 1 else f" rank {self.rank}" if self.rank else ""
        detail += f" turns {self.turns}" if self.turns else ""
        method = "dense" if self.method == "none" else self.method
        dense = ", dense step" if self.dense_step else ""
        wire = "bf16" if self.wire == "bf16" else "fp32"
        return f"{method}{detail}{dense}, {wire}, {'overlapped' if self.overlap else 'at once'}"

    @property
    def settings(self) -> tuple[str, ...]:
        own = {"method": self.method, "wire": self.wire, "overlap": self.overlap}
        if self.density < 1:
            own["density"] = self.density
        if self.method == "radius":
            own |= {"interval": 10**9, "warmup_steps": 1}
        if self.turns:
            own |= {"turns": self.turns, "moments": "wait"}
        if self.rank:
            own["rank"] = self.rank
        return tuple(f"compression.{key}={value}" for key, value in own.items())


BASELINE = Contender(method="none", overlap=False)
WAYS = tuple({"wire": wire, "overlap": overlap} for wire in ("same", "bf16") for overlap in (False, True))


@dataclass(frozen=True, kw_only=True)
class Plan:
    model: tuple[str, ...]
    contenders: tuple[Contender, ...]
    rounds: int
    rates: tuple[float, ...] = ()  #: multiples of the main rate at which some contenders also run


def plan(quick: bool) -> Plan:
    """quick: a tiny model and few contenders, a smoke test."""
    dense = tuple(Contender(method="none", **way) for way in WAYS)
    ways, densities = ((WAYS[0],), (0.9, 0.1)) if quick else (WAYS, DENSITIES)
    radius = tuple(Contender(method="radius", density=d, **way) for way in ways for d in densities)
    refresh = tuple(Contender(method="radius", density=radius[-1].density, dense_step=True, **way) for way in ways)
    turned = tuple(Contender(method="radius", density=0.4, turns=4, **way) for way in ways[:2])
    if quick:
        shape = ("model.n_layer=1", "model.d_model=32", "loop.seq_len=32", "loop.global_batch=8")
        return Plan(model=shape, contenders=(*dense[:2], *radius, *turned, *refresh), rounds=2, rates=(0.5,))
    # So many tokens that, at the derived rate, two cores have time left for the kernel's work of shaping links.
    shape = ("model.n_layer=3", "model.n_head=6", "model.d_model=192", "loop.seq_len=128", "loop.global_batch=32")
    # At 4 ranks an all-gather of k values and indices sends as much as an all-reduce of 4 k values.
    rivals = (
        Contender(method="random-k", density=0.4),
        Contender(method="top-k", density=0.1),
        Contender(method="powersgd", rank=4),
        Contender(method="powersgd", rank=51),  # the largest that sends at most 0.4 of the gradients
    )
    rates = (0.125, 0.25, 0.5, 2.0, 4.0, 8.0)
    return Plan(model=shape, contenders=(*dense, *radius, *turned, *refresh, *rivals), rounds=12, rates=rates)


class Bench:
    """One rank's engines, one per contender, and its link: emulated, or shaped by the kernel."""

    def __init__(self, world: World, what: Plan, link: str = "emulated") -> None:
        self.world, self.plan, self.link = world, what, link
        common = ("parallel.strategy=ddp", "loop.device=cpu", *what.model)
        self.run = recipe("laptop").override(*common)
        self.engines: dict[tuple[str, ...], Engine] = {}
        for contender in (BASELINE, *what.contenders):
            # torch's PowerSGD needs a single bucket; the others get several, so that there is something to overlap.
            bucket = () if contender.rank else ("parallel.bucket_mb=0.5",)
            if contender.settings not in self.engines:
                self.engines[contender.settings] = build(self.run.override(*bucket, *contender.settings), world)
        self.batch = random_batch(self.run, world.size)
        for engine in self.engines.values():
            for _ in range(3):  # DDP rebuilds its buckets, PowerSGD starts at its third step
                engine.step(self.batch, 1e-4)

    def say(self, message: str) -> None:
        if self.world.is_main:
            print(message, file=sys.stderr, flush=True)

    def slow_down(self, rate_mbit_s: float) -> None:
        if self.link == "emulated":
            self.world.link.rate_mbit_s = rate_mbit_s
        else:
            shape(rate_mbit_s)
        self.world.barrier()

    def step(self, contender: Contender) -> None:
        engine = self.engines[contender.settings]
        if contender.method == "radius":  # its first step is dense, all others are sparse
            engine.compressor.step = 0 if contender.dense_step else 1
        engine.step(self.batch, 1e-4)

    def silent(self) -> None:
        """The baseline's step without its all-reduce."""
        without_sending(self.engines[BASELINE.settings], self.batch)

    def rate_mbit_s(self, steps: dict[str, Callable[[], object]]) -> float:
        """The rate at which the baseline's all-reduce takes SHARE of its step; leaves the links at this rate.

        The first guess counts bytes. On real links and busy processors an all-reduce takes longer than that, and longer
        among all contenders (`steps`) than alone, so the rate is corrected by times measured alone and among them.
        """
        rounds = max(3, self.plan.rounds)
        compute_s = turns(self.world, {SILENT: self.silent}, rounds).median_s(SILENT)
        nbytes = cost.wire_bytes("all_reduce", 4 * cost.parameter_count(self.run.model), self.world.size)
        rate = nbytes * FRAMING * 8 / (compute_s * SHARE / (1 - SHARE)) / 1e6
        alone = {name: steps[name] for name in (SILENT, BASELINE.name)}
        for actions, n in ((alone, rounds), (steps, max(2, self.plan.rounds // 2))):
            self.slow_down(rate := self.world.from_rank0(lambda rate=rate: rate))
            timed = turns(self.world, actions, n)
            compute_s, taken_s = timed.median_s(SILENT), timed.median_s(BASELINE.name)
            rate *= min(max((taken_s - compute_s) / (compute_s * SHARE / (1 - SHARE)), 0.5), 2)
        rate = self.world.from_rank0(lambda: rate)
        self.slow_down(rate)
        return rate

    def sizes(self, contender: Contender) -> dict[str, int]:
        """Bytes of one step: payload of the collectives, bytes sent by one rank on a ring, held from step to step by
        the compressor, and peak held."""
        before = self.world.traffic.snapshot()
        self.step(contender)
        counts = self.world.traffic.since(before)
        wire = sum(cost.wire_bytes(op, count.payload_bytes, n) for (op, n), count in counts.items())
        step, held = (lambda: self.step(contender)), self.engines[contender.settings].held
        return {
            "payload_bytes": sum(count.payload_bytes for count in counts.values()),
            "wire_bytes": round(wire),
            "held_bytes": held_bytes(held()).get("compression", 0),
            "peak_bytes": sum(step_peak_bytes(step, held, self.world.device).values()),
        }

    def masking(self, contender: Contender) -> Callable[[], None]:
        """Radius's work on gradients in a sparse step apart from sending: select, pack, unpack, keep the residual."""
        engine = self.engines[contender.settings]
        compressor, buckets = engine.compressor, []
        pack = compressor.pack
        compressor.pack = lambda bucket: buckets.append(bucket) or pack(bucket)
        self.step(contender)
        del compressor.pack  # delete the instance's attribute, which uncovers the class's

        def alone() -> None:
            for bucket in buckets:
                compressor.check_finite(bucket.parameters, bucket.gradients)
                share = compressor.share(compressor.pack(bucket))
                compressor.unpack(bucket, share.mul_(self.world.size))  # keeps the magnitudes constant over many turns
            compressor._norms.clear()

        return alone


def measure(world: World, quick: bool, link: str = "emulated") -> dict:
    """Seconds of every turn and bytes of every contender; all ranks agree except on clock readings."""
    torch.set_num_threads(1)
    what = plan(quick)
    bench = Bench(world, what, link)
    sizes = {c.name: bench.sizes(c) for c in what.contenders}
    steps = {SILENT: bench.silent, **{c.name: (lambda c=c: bench.step(c)) for c in what.contenders}}
    rate = bench.rate_mbit_s(steps)
    bench.say(f"the links are set to {rate:.1f} Mbit/s")
    timed = turns(world, steps, what.rounds)
    parts = turns(world, _parts(bench, sizes), what.rounds)
    bench.say(f"{len(what.contenders)} contenders and their parts done, {what.rounds} rounds")
    few = [c for c in what.contenders if not c.dense_step and (c.method == "none" or c.density in (0.4, 0.1))]
    few = [c for c in few if c.method in ("none", "radius") and not c.turns and (c.overlap or c.wire == "same")]
    at_rates = {}
    for factor in what.rates:
        bench.slow_down(rate * factor)
        at_rates[str(factor)] = turns(world, {c.name: steps[c.name] for c in few}, max(2, what.rounds // 2)).seconds
        bench.say(f"{rate * factor:.1f} Mbit/s done")
    return {
        "ranks": world.size,
        "parameters": cost.parameter_count(bench.run.model),
        "tokens": bench.run.loop.global_batch * bench.run.loop.seq_len,
        "rounds": what.rounds,
        "link": link,
        "link_mbit_s": rate,
        "compute_s": timed.median_s(SILENT),
        "contenders": {c.name: {**asdict(c), **sizes[c.name]} for c in what.contenders},
        "seconds": {name: seconds for name, seconds in timed.seconds.items() if name != SILENT},
        "parts": parts.seconds,
        "at_rates": at_rates,
    }


def _parts(bench: Bench, sizes: dict[str, dict[str, int]]) -> dict[str, Callable[[], object]]:
    """Parts of a step alone: the all-reduce of each size, and Radius's own work at each density."""
    actions: dict[str, Callable[[], object]] = {}
    for contender in bench.plan.contenders:
        if contender.overlap or contender.wire != "same" or contender.dense_step:
            continue
        buffer = torch.zeros(sizes[contender.name]["payload_bytes"] // 4)
        actions[f"all-reduce: {contender.name}"] = lambda buffer=buffer: dist.all_reduce(buffer)
        if contender.method == "radius":
            actions[f"masking: {contender.name}"] = bench.masking(contender)
    return actions
