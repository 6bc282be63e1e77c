"""GPT-2 on this GPU: tokens per second, model FLOPs utilization, memory.

    python benchmarks/gpu.py [--size 355M] [--batch 16] [--quick] [--json]

It runs the trainer serial as a study does (aiscale.measure.study.cell), with bf16 autocast over
fp32 weights, torch's flash attention and torch.compile, which takes a minute or two. The 355M model
is that of Radius, whose vocabulary of 50257 is padded to 50304, a multiple of 128: matrix units
work in tiles, and a partial tile costs more than 47 unused rows. The others have 50257. MFU is
`cost.flops_per_token` over the data sheet's peak.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from common import arguments, check, finish, machine_facts, table

from aiscale.measure.distributed import connect
from aiscale.measure.meter import peak_flops
from aiscale.measure.study.engine import attempt
from aiscale.measure.study.grid import AXES, Cell, run_of, study_of
from aiscale.plan import cost

SIZES = {"124M": "gpt2", "355M": "radius-355m", "774M": "gpt2-large", "1558M": "gpt2-xl"}
STEPS = 20  #: of an epoch, of which there are two; the second is timed
TARGET_MFU = 0.45  #: for the 355M model on the cards in JUDGED
JUDGED = ("H100", "H200")
BATCH = {"124M": 64, "355M": 32, "774M": 16, "1558M": 8, "quick": 4}  #: beyond, speed hardly rises


def measure(sizes: list[str], batch: int | None = None, steps: int = STEPS) -> dict:
    """One row per size, and the check on 355M if the card is in JUDGED."""
    rows = [{"size": size, **measure_training(cell_of(size, batch, steps))} for size in sizes]
    judged = [
        row
        for row in rows
        if row["size"] == "355M" and any(name in row["device"] for name in JUDGED)
    ]
    checks = [check("MFU of 355M", row["mfu"], TARGET_MFU, at_most=False) for row in judged]
    return {"rows": rows, "checks": checks, "machine": machine_facts()}


def cell_of(
    size: str, batch: int | None = None, steps: int = STEPS, *, compile: bool = True
) -> Cell:
    """The training of that size, in bf16 on one rank; "quick" is a tiny model."""
    batch, length = batch or BATCH[size], 64 if size == "quick" else 1024
    shape = {
        "size": SIZES.get(size, "laptop"),
        "batch": batch,
        "length": length,
        "compile": compile,
    }
    data_kib = -(-steps * batch * length // 1024)
    return AXES | shape | {"strategy": "serial", "precision": "bf16", "data_kib": data_kib}


def measure_training(cell: Cell) -> dict:
    """Train it on a GPU, or where there is none on the CPU."""
    with tempfile.TemporaryDirectory() as scratch:
        found = attempt(
            study_of({"name": "gpu", "base": cell, "cell_minutes": 10}), cell, Path(scratch)
        )
    if "tokens_per_s" not in found:
        raise SystemExit(f"{cell['size']}: {found['status']}: {found['error']}")
    run = run_of(cell)
    peak, source = peak_of(run.loop.precision)
    rate = found["tokens_per_s"]
    return {
        "parameters": cost.parameter_count(run.model),
        "batch": cell["batch"],
        "seq_len": cell["length"],
        "step_s": found["step_s"],
        "tokens_per_s": rate,
        "mfu": rate * cost.flops_per_token(run.model, cell["length"]) / peak,
        "peak_flops": peak,
        "peak_source": source,
        "peak_memory_bytes": found["peak_bytes"],
        "ready_s": found["ready_s"],
        "device": found["device"],
    }


def peak_of(precision: str) -> tuple[float, str]:
    """FLOP/s of this machine's GPU by its data sheet, or of its CPU as measured; and which."""
    world = connect("cuda" if torch.cuda.is_available() else "cpu")
    peak = peak_flops(world, precision)
    world.close()
    return peak


def show(result: dict) -> None:
    rows = [
        (
            row["size"],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['mfu']:.1%}",
            f"{row['step_s'] * 1e3:.1f} ms",
            f"{row['batch']} x {row['seq_len']}",
            f"{row['peak_memory_bytes'] / 2**30:.1f} GiB",
            f"{row['ready_s']:.0f} s",
        )
        for row in result["rows"]
    ]
    first = result["rows"][0]
    peak = f"{first['peak_flops'] / 1e12:,.0f} TFLOP/s"
    title = f"{first['device']}; MFU is over {peak}: {first['peak_source']}"
    table(title, ("", "tokens/s", "MFU", "a step", "of tokens", "peak memory", "ready after"), rows)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument(
        "--size", action="append", choices=SIZES, help="may be repeated (default: 124M and 355M)"
    )
    parser.add_argument(
        "--batch",
        type=int,
        help="sequences of 1024 tokens in a step; lower it where memory runs out",
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks/gpu.py needs a GPU, but torch sees none here: run it on a machine with one"
        )
    sizes = ["quick"] if args.quick else args.size or ["124M", "355M"]
    raise SystemExit(
        finish(measure(sizes, args.batch, 3 if args.quick else STEPS), show, args.json)
    )
