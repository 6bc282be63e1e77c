"""How much time DDP adds to a step, and how much of it overlaps with the backward pass: `aiscale bench ddp`, two ranks.

Three actions take turns in the same two processes: a DDP step, the same step under `no_sync` (both ranks work, nothing
is sent), and an all-reduce of all gradients alone. Without any overlap or waste, a DDP step takes the sum of the other
two.
"""

from __future__ import annotations

from aiscale.bench.ranks import Report, on_ranks, random_batch, silent, turns, without_sending
from aiscale.bench.tables import check, checks_table, heading, table
from aiscale.bench.timing import machine_facts

RANKS, ROUNDS, QUICK_ROUNDS = 2, 30, 3
TARGET = 1.15  #: at most this: DDP step / (step without communication + all-reduce alone)


def bench_ddp(*, quick: bool = False, report: Report = silent) -> dict:
    """Median seconds of the three, and the check on DDP's overhead. quick: a tiny model, no checks."""
    report(f"{RANKS} ranks, {QUICK_ROUNDS if quick else ROUNDS} rounds")
    result = on_ranks(RANKS, "aiscale.bench.ddp:measure", quick)
    checks = [] if quick else [check("a DDP step over its parts", result["ratio"], TARGET)]
    return {**result, "checks": checks, "machine": machine_facts()}


def show_ddp(result: dict) -> None:
    heading(result)
    about = f"{result['ranks']} ranks, {result['gradient_bytes'] / 2**20:.1f} MiB of gradients, "
    rows = [(name, f"{seconds * 1e3:.1f}") for name, seconds in result["median_s"].items()]
    rows.append(("the first over the sum of the others", f"{result['ratio']:.2f}"))
    table(f"{about}{result['rounds']} rounds", ("", "ms"), rows)
    checks_table(result["checks"])


def measure(world, quick: bool) -> dict:
    import torch
    import torch.distributed as dist

    from aiscale.parallel import build
    from aiscale.recipes import recipe

    shape = ("model.n_layer=1",) if quick else ("model.n_layer=6", "model.n_head=6", "model.d_model=384")
    run = recipe("laptop").override("parallel.strategy=ddp", "loop.device=cpu", *shape)
    engine = build(run, world)
    batch = random_batch(run, world.size)
    gradients = torch.zeros(sum(p.numel() for p in engine.model.parameters()))
    actions = {
        "DDP step": lambda: engine.step(batch, 1e-4),
        "step under no_sync": lambda: without_sending(engine, batch),
        "all-reduce alone": lambda: dist.all_reduce(gradients),
    }
    rounds = QUICK_ROUNDS if quick else ROUNDS
    timing = turns(world, actions, rounds, warmup=3)
    median_s = {name: timing.median_s(name) for name in actions}
    ddp, *parts = median_s.values()
    facts = {"ranks": world.size, "rounds": rounds, "gradient_bytes": gradients.nbytes}
    return {**facts, "median_s": median_s, "ratio": ddp / sum(parts)}
