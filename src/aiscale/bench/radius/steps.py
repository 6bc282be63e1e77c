"""The ranks of `aiscale bench radius`: every way to send gradients takes its turn in the same processes.

    measured = on_ranks(4, "aiscale.bench.radius.steps:measure", quick, "emulated")      # as `study` does

It measures how long a step takes without communication, from which the link's rate follows; each contender's step at
that rate, with the bytes that it sent; an all-reduce by itself, and what Radius does to a gradient by itself; some of
the contenders at other rates. `study` computes savings from it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from aiscale import cost
from aiscale.bench.radius.nodes import shape
from aiscale.bench.radius.runs import DENSITIES, powersgd_rank
from aiscale.bench.ranks import random_batch, turns, without_sending
from aiscale.distributed import World
from aiscale.distributed.link import FRAMING
from aiscale.meter import held_bytes, step_peak_bytes
from aiscale.parallel import build
from aiscale.parallel.serial import Engine
from aiscale.recipes import recipe

SHARE = 0.9 / 1.855  #: of a step of the published baseline that its exchange takes: seconds, a fit of its table
SILENT = "no communication"
INTERVAL = 200  #: published; here it only says how often the measured dense step comes


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to send the gradients of a step."""

    method: str
    wire: str = "same"
    overlap: bool = True
    density: float = 1.0
    dense_step: bool = False  #: the dense step of Radius, with the residual and the refresh
    rank: int = 0  #: of PowerSGD's factors
    turns: int = 0  #: of Radius, with moments that wait

    @property
    def name(self) -> str:
        detail = f" d {self.density:g}" if self.density < 1 else f" rank {self.rank}" if self.rank else ""
        detail += f" turns {self.turns}" if self.turns else ""
        method = "dense" if self.method == "none" else self.method
        dense = ", dense step" if self.dense_step else ""
        return f"{method}{detail}{dense}, {self.wire_name}, {'overlapped' if self.overlap else 'at once'}"

    @property
    def wire_name(self) -> str:
        return "bf16" if self.wire == "bf16" else "fp32"

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
    """How much is measured."""

    model: tuple[str, ...]
    contenders: tuple[Contender, ...]
    rounds: int
    rates: tuple[float, ...] = ()  #: multiples of the main rate that some contenders see as well


def plan(quick: bool) -> Plan:
    """quick: a tiny model and few contenders, enough to see that everything runs."""
    dense = tuple(Contender(method="none", **way) for way in WAYS)
    ways, densities = ((WAYS[0],), (0.9, 0.1)) if quick else (WAYS, DENSITIES)
    radius = tuple(Contender(method="radius", density=d, **way) for way in ways for d in densities)
    refresh = tuple(Contender(method="radius", density=radius[-1].density, dense_step=True, **way) for way in ways)
    turned = tuple(Contender(method="radius", density=0.4, turns=4, **way) for way in ways[:2])
    if quick:
        shape = ("model.n_layer=1", "model.d_model=32", "loop.seq_len=32", "loop.global_batch=8")
        return Plan(model=shape, contenders=(*dense[:2], *radius, *turned, *refresh), rounds=2, rates=(0.5,))
    # So many tokens that, at the rate that follows, two cores have time left for what shaped links cost the kernel.
    shape = ("model.n_layer=3", "model.n_head=6", "model.d_model=192", "loop.seq_len=128", "loop.global_batch=32")
    # At 4 ranks an all-gather of k values and indices sends as much as an all-reduce of 4 k values.
    rivals = (
        Contender(method="random-k", density=0.4),
        Contender(method="top-k", density=0.1),
        Contender(method="powersgd", rank=4),
        Contender(method="powersgd", rank=powersgd_rank(recipe("laptop").override(*shape), 0.4)),
    )
    rates = (0.125, 0.25, 0.5, 2.0, 4.0, 8.0)
    return Plan(model=shape, contenders=(*dense, *radius, *turned, *refresh, *rivals), rounds=12, rates=rates)


class Bench:
    """One rank's engines, one for each way to send, and its link: emulated, or one that the kernel shapes."""

    def __init__(self, world: World, what: Plan, link: str = "emulated") -> None:
        self.world, self.plan, self.link = world, what, link
        common = ("parallel.strategy=ddp", "loop.device=cpu", *what.model)
        self.run = recipe("laptop").override(*common)
        self.engines: dict[tuple[str, ...], Engine] = {}
        for contender in (BASELINE, *what.contenders):
            # torch's PowerSGD wants one bucket; for the others several, so that there is something to overlap.
            bucket = () if contender.rank else ("parallel.bucket_mb=0.5",)
            if contender.settings not in self.engines:
                self.engines[contender.settings] = build(self.run.override(*bucket, *contender.settings), world)
        self.batch = random_batch(self.run, world.size)
        for engine in self.engines.values():
            for _ in range(3):  # DDP refills its buckets, PowerSGD begins at its third step
                engine.step(self.batch, 1e-4)

    def say(self, message: str) -> None:
        if self.world.is_main:
            print(message, file=sys.stderr, flush=True)

    def slow_down(self, rate_mbit_s: float) -> None:
        """Give every rank's link this rate."""
        if self.link == "emulated":
            self.world.link.rate_mbit_s = rate_mbit_s
        else:
            shape(rate_mbit_s)
        self.world.barrier()

    def step(self, contender: Contender) -> None:
        engine = self.engines[contender.settings]
        if contender.method == "radius":  # its first step is the dense one, all others are sparse
            engine.compressor.step = 0 if contender.dense_step else 1
        engine.step(self.batch, 1e-4)

    def silent(self) -> None:
        """The baseline's step without its all-reduce."""
        without_sending(self.engines[BASELINE.settings], self.batch)

    def rate_mbit_s(self, steps: dict[str, Callable[[], object]]) -> float:
        """The rate at which the baseline's all-reduce takes SHARE of its step; the links are left at it.

        The first guess counts bytes. On real links and busy processors an exchange takes longer than that, and longer
        among all contenders (`steps`) than by itself, so the rate is put right by what it took, alone and among them.
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
        """Bytes of one step: asked of the collectives, sent by one rank on a ring, held from step to step by what
        compresses, and the most that is held at any time."""
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
        """What a sparse step of Radius does to gradients beside sending them: look, pack, unpack, keep the rest."""
        engine = self.engines[contender.settings]
        compressor, buckets = engine.compressor, []
        pack = compressor.pack
        compressor.pack = lambda bucket: buckets.append(bucket) or pack(bucket)
        self.step(contender)
        del compressor.pack  # the instance's; the class's shows again

        def alone() -> None:
            for bucket in buckets:
                compressor.check_finite(bucket.parameters, bucket.gradients)
                share = compressor.share(compressor.pack(bucket))
                compressor.unpack(bucket, share.mul_(self.world.size))  # keeps the numbers' size over many turns
            compressor._norms.clear()

        return alone


def measure(world: World, quick: bool, link: str = "emulated") -> dict:
    """Seconds of every turn and bytes of every contender, the same on all ranks but for the clock."""
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
    """Pieces of a step by themselves: the all-reduce of each size, and Radius's own work at each density."""
    actions: dict[str, Callable[[], object]] = {}
    for contender in bench.plan.contenders:
        if contender.overlap or contender.wire != "same" or contender.dense_step:
            continue
        buffer = torch.zeros(sizes[contender.name]["payload_bytes"] // 4)
        actions[f"all-reduce: {contender.name}"] = lambda buffer=buffer: dist.all_reduce(buffer)
        if contender.method == "radius":
            actions[f"masking: {contender.name}"] = bench.masking(contender)
    return actions
