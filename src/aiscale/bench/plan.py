"""The planner held to steps of our own, over links that the kernel slows: `aiscale bench plan` (Linux with namespaces).

Four ranks train, each on a virtual node with one card (`nodes`): DDP, FSDP, and tensor times pipeline parallelism by
Megatron-Core. What these cores compute in a second no catalogue tells: one step over an unlimited link says it. From
that the planner predicts the step at three rates, at which the exchange takes at least half of it, and the bytes of
parameters, gradients and optimizer states, which must be exact. Nothing here is fitted. Two minutes.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from types import SimpleNamespace

from aiscale.bench.nodes import shape as slow_down
from aiscale.bench.nodes import start_on_nodes, why_no_nodes
from aiscale.bench.ranks import Report, on_ranks, random_batch, silent, turns
from aiscale.bench.tables import check, checks_table, heading, table
from aiscale.config import ConfigError, Run
from aiscale.cost.collectives import NIC_SHARE
from aiscale.distributed.link import FRAMING
from aiscale.machines import Accelerator, Machine, Network, Node
from aiscale.meter import held_bytes
from aiscale.plan.constants import CONSTANTS
from aiscale.plan.hardware import Platform, platform_of
from aiscale.plan.layout import Layout, Shape, Software, shape_of
from aiscale.plan.memory import stage_memory
from aiscale.plan.step import step_seconds

RANKS = 4
RATES_MBIT_S = (50, 100, 200)
STEP_TARGET = 0.15  #: |predicted / measured - 1| of the median step
LEAST_SHARE = 0.5  #: of a step, that the exchange takes
HELD = {"parameters": "weights", "gradients": "gradients", "optimizer states": "optimizer states"}
COUNTER_BYTES = 4  #: torch's AdamW counts the steps of each tensor: a state that the planner leaves out
#: Nobody else uses this network, and the clock runs inside the loop: no rank is late, no step has a fixed cost.
ALONE = {"exchange_network": 1.0, "jitter": 0.0, "straggler_s": 0.0, "step_s": 0.0}

_MODEL = ("model.norm=rmsnorm", "model.position=rotary", "model.activation=swiglu", "model.bias=false")
_MODEL += ("model.tied=false", "model.n_layer=4", "model.n_head=4", "model.d_model=192", "model.d_ff=512")
_LOOP = ("loop.device=cpu", "loop.precision=fp32", "loop.seq_len=128")


@dataclass(frozen=True)
class Case:
    """A strategy's settings and batch, and how the planner describes it."""

    settings: tuple[str, ...]
    layout: Layout

    def run(self) -> Run:
        batch = (f"loop.micro_batch={self.layout.micro_batch}", f"loop.global_batch={self.layout.global_batch}")
        return Run().override(*_MODEL, *_LOOP, *self.settings, *batch)


#: Without prefetching FSDP waits for its collectives where they stand, as tensor parallelism on a CPU does.
_WAITED = Software(overlap=False, tp_overlap="none")
CASES = {
    "ddp": Case(
        ("parallel.strategy=ddp", "parallel.bucket_mb=1"),
        Layout(dp=RANKS, micro_batch=2, global_batch=8, precision="fp32"),
    ),
    "fsdp": Case(
        ("parallel.strategy=fsdp", "parallel.prefetch=0"),
        Layout(dp=RANKS, fsdp=True, micro_batch=2, global_batch=8, precision="fp32", software=_WAITED),
    ),
    "tp 2 x pp 2": Case(
        ("parallel.strategy=megatron", "parallel.tp=2", "parallel.pp=2"),
        Layout(tp=2, pp=2, micro_batch=2, global_batch=8, precision="fp32", software=_WAITED),
    ),
}


def bench_plan(*, quick: bool = False, report: Report = silent) -> dict:
    """Predicted and measured steps of each case at each rate, and bytes held by each rank."""
    if why := why_no_nodes():
        raise ConfigError(f"bench plan: {why}; it needs links that the kernel slows")
    from aiscale.bench.timing import machine_facts

    rounds, rates = (1, RATES_MBIT_S[-1:]) if quick else (5, RATES_MBIT_S)
    rows = []
    for name in CASES:
        report(f"{name}: {rounds} steps at each of {', '.join(f'{rate} Mbit/s' for rate in rates)}")
        found = on_ranks(RANKS, "aiscale.bench.plan:measure", name, rates, rounds, start=start_on_nodes)
        rows += compare(name, found["seconds"], found["held"])
    result = {"ranks": RANKS, "rounds": rounds, "rows": rows, "machine": machine_facts()}
    return {**result, "checks": [] if quick else checks(rows)}


def measure(world, name: str, rates: list[float], rounds: int) -> dict:
    """Seconds of each step, by rate (0: unlimited), and the bytes that each rank holds, by category."""
    import torch

    from aiscale.parallel import build

    torch.set_num_threads(1)
    run = CASES[name].run()
    engine, seconds = build(run, world), {}
    batch = random_batch(run, engine.data_world)
    for rate in (0, *rates):
        slow_down(rate)
        world.barrier()
        timed = turns(world, {name: lambda: engine.step(batch, 1e-4)}, rounds, warmup=1 if rate else 3)
        seconds[str(rate)] = timed.seconds[name]
    held = held_bytes(engine.held())
    return {"seconds": seconds, "held": world.gather({category: held[category] for category in HELD})}


def compare(name: str, seconds: dict[str, list[float]], held: list[dict]) -> list[dict]:
    """A row for each rate."""
    case, compute_s = CASES[name], statistics.median(seconds["0"])
    model = shape_of(case.run().model, case.run().loop.seq_len)
    constants = SimpleNamespace(**vars(CONSTANTS) | ALONE)

    def step_s(rate_mbit_s: float, flops: float) -> float:
        return step_seconds(model, case.layout, platform(rate_mbit_s, flops), constants).total_s

    at_1e12_s = 2 * (step_s(0, 1e12) - step_s(0, 2e12))  # computing alone: messages have their latency at any speed
    latency_s = step_s(0, 1e12) - at_1e12_s
    flops = 1e12 * at_1e12_s / max(compute_s - latency_s, compute_s / 10)
    rows = []
    for rate, times in seconds.items():
        measured = statistics.median(times)
        row = {"name": name, "link_mbit_s": float(rate), "step_s": measured, "predicted_s": step_s(float(rate), flops)}
        rows.append(row | {"exchange_share": 1 - compute_s / measured})
    facts = {"compute_s": compute_s, "held_bytes": held, "predicted_bytes": predicted_bytes(case, model, constants)}
    return [row | facts for row in rows if row["link_mbit_s"]]


def predicted_bytes(case: Case, model: Shape, constants: SimpleNamespace) -> list[dict]:
    """By rank and category; with torch's counters of steps, one a tensor: six a layer, embedding, last norm, head."""
    stages = case.layout.stages(model)
    found = []
    for stage, memory in zip(stages, stage_memory(model, case.layout, constants), strict=True):
        held = {ours: memory[theirs] for ours, theirs in HELD.items()}
        held["optimizer states"] += COUNTER_BYTES * (6 * stage.layers + stage.embedding + 2 * stage.head)
        found += [held] * (RANKS // len(stages))
    return found


def platform(rate_mbit_s: float, flops: float) -> Platform:
    """Nodes of one device that computes at `flops`, whatever it reads, on links of that rate (0: unlimited)."""
    peak = {"fp32": flops / 1e12}
    device = Accelerator(name="these cores", tflops=peak, memory_gb=1, memory_tb_s=1e6, library="gloo")
    gb_s = (rate_mbit_s or 1e9) / 8e3 / FRAMING / NIC_SHARE  # the planner takes NIC_SHARE of an adapter
    network = Network(name="slowed by the kernel", nics=1, nic_gb_s=gb_s, source="aiscale.bench.nodes")
    node = Node(accelerator=device, devices=1, ring_gb_s=1, source="aiscale.bench.nodes")
    return replace(platform_of(Machine(name="virtual nodes", site="", node=node, network=network)), host_s=1e9)


def checks(rows: list[dict]) -> list[dict]:
    found = []
    for row in rows:
        where = f"{row['name']} at {row['link_mbit_s']:g} Mbit/s"
        found.append(check(f"{where}: step, off by", abs(row["predicted_s"] / row["step_s"] - 1), STEP_TARGET))
        found.append(check(f"{where}: share of the exchange", row["exchange_share"], LEAST_SHARE, at_most=False))
    for name in CASES:
        row = next(row for row in rows if row["name"] == name)
        found.append(check(f"{name}: bytes held, off by", _apart(row), 0))
    return found


def _apart(row: dict) -> float:
    pairs = zip(row["held_bytes"], row["predicted_bytes"], strict=True)
    return max(abs(held[category] - said[category]) for held, said in pairs for category in HELD)


def show_plan(result: dict) -> None:
    heading(result, f"{result['ranks']} ranks on virtual nodes, median of {result['rounds']} steps")
    rows = [
        (
            row["name"],
            f"{row['link_mbit_s']:g}",
            f"{row['exchange_share']:.0%}",
            f"{row['predicted_s']:.3f}",
            f"{row['step_s']:.3f}",
            f"{row['predicted_s'] / row['step_s'] - 1:+.1%}",
        )
        for row in result["rows"]
    ]
    table("steps", ("", "Mbit/s", "exchange", "predicted s", "measured s", ""), rows)
    checks_table(result["checks"])
