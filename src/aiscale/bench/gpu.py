"""GPT-2 on this GPU: tokens per second, model FLOPs utilization, memory: `aiscale bench gpu [--size 355M] [--json]`.

It runs the engine that `fit` uses, with bf16 autocast over fp32 weights, fused AdamW, torch's flash attention and
torch.compile. GPT-2's vocabulary of 50257 is padded to 50304, a multiple of 128: matrix units work in tiles, and a
partial tile costs more than 47 unused rows. MFU is `cost.flops_per_token` over the data sheet's peak.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from aiscale import cost
from aiscale.bench.ranks import Report, random_batch, silent
from aiscale.bench.tables import check, checks_table, heading, table
from aiscale.bench.timing import machine_facts
from aiscale.config import ConfigError, Run
from aiscale.distributed import World, connect
from aiscale.meter import Meter, peak_memory_bytes
from aiscale.model.build import count_parameters
from aiscale.parallel import build
from aiscale.recipes import recipe

SIZES = {"124M": "gpt2", "355M": "gpt2-medium", "774M": "gpt2-large", "1558M": "gpt2-xl"}
PADDED_VOCAB = 50304
STEPS, WARMUP = 20, 5
TARGET_MFU = 0.45  #: for the 355M model on the cards in JUDGED
JUDGED = ("H100", "H200")


def bench_gpu(
    *, quick: bool = False, report: Report = silent, sizes: Sequence[str] = ("124M", "355M"), batch: int | None = None
) -> dict:
    """One row per size, and the check on 355M if the card is in JUDGED. quick: a tiny model, no check.

    batch: sequences of 1024 tokens in a step; None: chosen from the card's memory. Raises ConfigError without a GPU,
    and if the batch does not fit.
    """
    if not torch.cuda.is_available():
        raise ConfigError("bench gpu needs a GPU, but torch sees none here: run it on a machine with one")
    world, rows = connect("cuda"), []
    try:
        for size in ("quick",) if quick else sizes:
            run = training_run(size, batch or _fitting_batch(size))
            report(
                f"{size}: {run.loop.global_batch} x {run.loop.seq_len} tokens a step; compiling takes a minute or two"
            )
            rows.append({"size": size, **measure_training(run, world, 3 if quick else STEPS)})
    finally:
        world.close()
    judged = [row for row in rows if row["size"] == "355M" and any(name in row["device"] for name in JUDGED)]
    checks = [check("MFU of 355M", row["mfu"], TARGET_MFU, at_most=False) for row in judged]
    return {"rows": rows, "checks": checks, "machine": machine_facts()}


def training_run(size: str, batch: int, *, compile: bool = True, device: str = "cuda") -> Run:
    """The run of that size, in bf16 on one rank; "quick" is a tiny model."""
    if size != "quick" and size not in SIZES:
        raise ConfigError(f"--size {size}: it must be one of {', '.join(SIZES)}")
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
    try:
        for step in range(warmup + steps):
            if step == warmup:
                ready_s = time.perf_counter() - start
            with meter.step():
                result = engine.step(batch, run.optimizer.lr)
            if step >= warmup:
                records.append(meter.record(result.tokens))
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"{loop.global_batch} sequences of {loop.seq_len} tokens do not fit this GPU's memory: lower --batch"
        ) from None
    finally:
        engine.close()
    step_s = statistics.median(record["step_s"] for record in records)
    rate = result.tokens / step_s
    return {
        "parameters": count_parameters(run.model),
        "batch": loop.global_batch,
        "seq_len": loop.seq_len,
        "step_s": step_s,
        "slowest_step_s": max(record["step_s"] for record in records),
        "tokens_per_s": rate,
        "mfu": rate * meter.flops_per_token / meter.peak_flops,
        "peak_flops": meter.peak_flops,
        "peak_source": meter.peak_source,
        "peak_memory_bytes": peak_memory_bytes(world.device),
        "ready_s": ready_s,
        "loss": result.loss,
        "compiled": loop.compile,
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
    }


def show_gpu(result: dict) -> None:
    first = result["rows"][0]
    heading(result, f"{first['device']}; bf16, one rank")
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
    source = f"MFU is measured against {first['peak_flops'] / 1e12:,.0f} TFLOP/s: {first['peak_source']}"
    table(source, ("", "tokens/s", "MFU", "a step", "of tokens", "peak memory", "ready after"), rows)
    checks_table(result["checks"])


def _fitting_batch(size: str) -> int:
    """Sequences of 1024 tokens that fit on this card by the figures below, capped where speed hardly rises."""
    memory_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    most = {"124M": 64, "355M": 32, "774M": 16, "1558M": 8}.get(size, 16)
    while most > 1 and most * _GIB_A_SEQUENCE.get(size, 0.1) > 0.6 * memory_gib:
        most //= 2
    return most


#: A generous estimate, GiB: what a sequence of 1024 tokens keeps for the backward pass, logits included
_GIB_A_SEQUENCE = {"124M": 1.1, "355M": 2.2, "774M": 4.0, "1558M": 7.0}
