"""The deepest GPT that trains within a limit of memory per rank, for each strategy.

    python benchmarks/largest.py OUT.json [--ranks 4] [--width 256] [--mib 96] \\
        [--strategies ddp zero3 ...]

Only the depth changes. Turing Technical Report 3 asked this of A100s with 40 GB. The trainers
train; a model fits if the peak of a step on each rank, as a study measures it, is at most the
limit, which nothing enforces: no rank runs out of memory here. The search starts where `cost`
predicts the limit, and halves what is left. fsdp-kept (fsdp_kept.py) does not free gathered weights
after the forward pass, so at its end a rank holds the whole model, as it does where FSDP wraps the
model as one unit.
"""

import argparse
import json
import math
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from common import machine_facts

from aiscale.errors import write_whole
from aiscale.measure.study.engine import attempt
from aiscale.measure.study.grid import AXES, Cell, run_of, study_of
from aiscale.plan import cost

KEPT = Path(__file__).with_name("fsdp_kept.py")
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp-kept")


def deepest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest number of layers that fits, 0 if none does; `guess` is tried first."""
    low, high, layers, stride = 0, math.inf, max(1, guess), 1
    while high - low > 1:
        low, high = (layers, high) if fits(layers) else (low, layers)
        if high == math.inf:
            layers = low + stride
        else:
            layers = (low + high) // 2 if low else max(1, high - stride)
        stride *= 2
    return low


def predicted_bytes(cell: Cell) -> int:
    return max(
        sum(cost.step_bytes(run_of(cell), cell["ranks"], rank).values())
        for rank in range(cell["ranks"])
    )


def search(strategy: str, ranks: int, width: int, limit: int) -> dict:
    """The row of a strategy."""

    def cell(layers: int) -> Cell:
        own = {"size": f"{layers}x{width}", "batch": 1, "data_kib": 1, "ranks": ranks}
        return AXES | own | {"strategy": strategy.removesuffix("-kept")}

    def fits(layers: int) -> bool:
        with TemporaryDirectory() as scratch:
            study = study_of({"name": "largest", "base": cell(layers)})
            script = KEPT if strategy == "fsdp-kept" else None
            found = attempt(study, cell(layers), Path(scratch), script)
        if "peak_bytes" not in found:
            raise SystemExit(f"{strategy}, {layers} layers: {found['status']}: {found['error']}")
        tried[layers] = found["peak_bytes"]
        print(f"{strategy}, {layers} layers: {tried[layers] / 2**20:.1f} MiB", flush=True)
        return tried[layers] <= limit

    tried: dict[int, int] = {}
    guess = next(layers for layers in count(1) if predicted_bytes(cell(layers)) > limit) - 1
    layers = deepest(fits, guess)
    sizes = {n: cost.parameter_count(run_of(cell(n)).model) for n in sorted(tried)}
    rows = [{"layers": n, "parameters": sizes[n], "peak_bytes": tried[n]} for n in sizes]
    largest = {"parameters": sizes[layers], "peak_bytes": tried[layers]} if layers else {}
    return {
        "strategy": strategy,
        "layers": layers,
        "predicted_layers": guess,
        **largest,
        "tried": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    for name, default in (("ranks", 4), ("width", 256), ("mib", 96)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=[*STRATEGIES])
    args = parser.parse_args()
    # for ranks: the profiler would warn in each
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    facts = {
        "ranks": args.ranks,
        "width": args.width,
        "limit_bytes": args.mib * 2**20,
        "machine": machine_facts(),
    }
    rows = [search(name, args.ranks, args.width, args.mib * 2**20) for name in args.strategies]
    write_whole(args.out, json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
