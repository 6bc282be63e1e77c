"""GPT-2 on this GPU: tokens per second, model FLOPs utilization, memory.

    python benchmarks/gpu.py [--size 355M] [--batch 16] [--quick] [--json]

It runs the engine that `fit` uses, with bf16 autocast over fp32 weights, fused AdamW, torch's flash attention and
torch.compile, which takes a minute or two. GPT-2's vocabulary of 50257 is padded to 50304, a multiple of 128: matrix
units work in tiles, and a partial tile costs more than 47 unused rows. MFU is `cost.flops_per_token` over the data
sheet's peak.
"""

from __future__ import annotations

import statistics
import time

import torch
from common import arguments, check, finish, machine_facts, table

from aiscale import cost
from aiscale.config import Run
from aiscale.distributed import World, connect
from aiscale.meter import Meter, peak_memory_bytes
from aiscale.model.build import count_parameters
from aiscale.parallel import build
from aiscale.recipes import recipe
from aiscale.verify.bytes import random_batch

SIZES = {"124M": "gpt2", "355M": "gpt2-medium", "774M": "gpt2-large", "1558M": "gpt2-xl"}
PADDED_VOCAB = 50304
STEPS, WARMUP = 20, 5
TARGET_MFU = 0.45  #: for the 355M model on the cards in JUDGED
JUDGED = ("H100", "H200")
BATCH = {"124M": 64, "355M": 32, "774M": 16, "1558M": 8, "quick": 16}  #: beyond, speed hardly rises


def measure(sizes: list[str], batch: int | None = None, steps: int = STEPS) -> dict:
    """One row per size, and the check on 355M if the card is in JUDGED."""
    world, rows = connect("cuda"), []
    for size in sizes:
        run = training_run(size, batch or BATCH[size])
        rows.append({"size": size, **measure_training(run, world, steps)})
    world.close()
    judged = [row for row in rows if row["size"] == "355M" and any(name in row["device"] for name in JUDGED)]
    checks = [check("MFU of 355M", row["mfu"], TARGET_MFU, at_most=False) for row in judged]
    return {"rows": rows, "checks": checks, "machine": machine_facts()}


def training_run(size: str, batch: int, *, compile: bool = True, device: str = "cuda") -> Run:
    """The run of that size, in bf16 on one rank; "quick" is a tiny model."""
    settings = ["parallel.strategy=serial", "loop.precision=bf16", f"loop.device={device}", f"loop.compile={compile}"]
    settings += [f"loop.global_batch={batch}", "loop.micro_batch=0"]
    if size != "quick":
        settings.append(f"model.vocab_size={PADDED_VOCAB}")
    return recipe(SIZES.get(size, "laptop")).override(*settings)


def measure_training(run: Run, world: World, steps: int = STEPS, warmup: int = WARMUP) -> dict:
    """Train `run` on random tokens and measure `steps` steps, after `warmup` steps that include compilation."""
    loop, start = run.loop, time.perf_counter()
    engine = build(run, world)
    meter = Meter(world, flops_per_token=cost.flops_per_token(run.model, loop.seq_len), precision=loop.precision)
    batch, records = random_batch(run, 1), []
    for step in range(warmup + steps):
        if step == warmup:
            ready_s = time.perf_counter() - start
        with meter.step():
            result = engine.step(batch, run.optimizer.lr)
        if step >= warmup:
            records.append(meter.record(result.tokens))
    engine.close()
    step_s = statistics.median(record["step_s"] for record in records)
    rate = result.tokens / step_s
    return {
        "parameters": count_parameters(run.model),
        "batch": loop.global_batch,
        "seq_len": loop.seq_len,
        "step_s": step_s,
        "tokens_per_s": rate,
        "mfu": rate * meter.flops_per_token / meter.peak_flops,
        "peak_flops": meter.peak_flops,
        "peak_source": meter.peak_source,
        "peak_memory_bytes": peak_memory_bytes(world.device),
        "ready_s": ready_s,
        "loss": result.loss,
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
    }


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
    title = f"{first['device']}; MFU is over {first['peak_flops'] / 1e12:,.0f} TFLOP/s: {first['peak_source']}"
    table(title, ("", "tokens/s", "MFU", "a step", "of tokens", "peak memory", "ready after"), rows)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--size", action="append", choices=SIZES, help="may be repeated (default: 124M and 355M)")
    parser.add_argument("--batch", type=int, help="sequences of 1024 tokens in a step; lower it where memory runs out")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu.py needs a GPU, but torch sees none here: run it on a machine with one")
    sizes = ["quick"] if args.quick else args.size or ["124M", "355M"]
    raise SystemExit(finish(measure(sizes, args.batch, 3 if args.quick else STEPS), show, args.json))
