"""What DDP adds to a step, and how much of it hides behind the backward pass: `aiscale bench ddp`, on two new ranks.

Three things take turns in the same two processes: a DDP step, the same step under `no_sync` (both ranks at work,
nothing sent), and an all-reduce of all gradients by itself. Were nothing overlapped and nothing wasted, the first
would be the sum of the other two.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from aiscale.bench.timing import machine_facts, paired

RANKS, ROUNDS = 2, 30
TARGET = 1.15  #: a DDP step over (a step without communication + an all-reduce alone), at most


class BenchError(RuntimeError):
    """A benchmark that did not come to its end; the message is one line."""


def bench_ddp(*, quick: bool = False, report: Callable[[str], None] = lambda message: None) -> dict:
    """Median seconds of the three, and the check that DDP wastes little. quick: a tiny model, judged by nothing."""
    from aiscale.distributed import launch

    report(f"{RANKS} ranks, {3 if quick else ROUNDS} rounds")
    with tempfile.TemporaryDirectory(prefix="aiscale-bench-") as folder:
        out = Path(folder) / "ddp.json"
        status = launch(RANKS, ["-m", "aiscale.bench.ddp", "quick" if quick else "full", str(out)])
        if status:
            raise BenchError(f"the ranks of bench ddp ended with status {status}; what went wrong stands above")
        result = json.loads(out.read_text())
    ratio = result["ratio"]
    check = {"name": "a DDP step over its parts", "value": ratio, "target": TARGET, "at_most": True}
    return {**result, "checks": [] if quick else [{**check, "met": ratio <= TARGET}], "machine": machine_facts()}


def show_ddp(result: dict) -> None:
    """Print what bench_ddp returned."""
    machine = result["machine"]
    print(f"{machine['date']}  {machine['processor']}, {machine['cores']} cores, torch {machine['torch']}")
    print(
        f"{result['ranks']} ranks, {result['gradient_bytes'] / 2**20:.1f} MiB of gradients, {result['rounds']} rounds"
    )
    for name, seconds in result["median_s"].items():
        print(f"  {name:18} {seconds * 1e3:8.1f} ms")
    print(f"  a DDP step takes {result['ratio']:.2f} times the sum of the other two (at most {TARGET} is asked for)")


def _rank(quick: bool, out: Path) -> None:
    """What each rank does."""
    import torch
    import torch.distributed as dist

    from aiscale.distributed import connect
    from aiscale.parallel import build
    from aiscale.recipes import recipe

    world = connect("cpu")
    shape = ("model.n_layer=1",) if quick else ("model.n_layer=6", "model.n_head=6", "model.d_model=384")
    run = recipe("laptop").override("parallel.strategy=ddp", "loop.device=cpu", *shape)
    engine = build(run, world)
    tokens = torch.randint(0, 256, (8, run.loop.seq_len + 1))
    batch = [(tokens[:, :-1], tokens[:, 1:])]
    gradients = torch.zeros(sum(p.numel() for p in engine.model.parameters()))

    def quiet_step() -> None:
        with engine.module.no_sync():
            engine.step(batch, 1e-4)

    def together(action: Callable[[], object]) -> Callable[[], None]:
        def timed() -> None:
            action()
            world.barrier()  # a step takes as long as its slowest rank

        return timed

    contenders = {
        "DDP step": together(lambda: engine.step(batch, 1e-4)),
        "step under no_sync": together(quiet_step),
        "all-reduce alone": together(lambda: dist.all_reduce(gradients)),
    }
    rounds = 3 if quick else ROUNDS
    timing = paired(contenders, rounds, warmup=3)
    if world.is_main:
        median_s = {name: timing.median_s(name) for name in contenders}
        ddp, *parts = median_s.values()
        facts = {"ranks": world.size, "rounds": rounds, "gradient_bytes": gradients.nbytes}
        out.write_text(json.dumps({**facts, "median_s": median_s, "ratio": ddp / sum(parts)}))
    world.close()


if __name__ == "__main__":
    _rank(sys.argv[1] == "quick", Path(sys.argv[2]))
