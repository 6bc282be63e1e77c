"""The parts of a day on one GPU, each a small JSON in the form of src/aiscale/published/measured.

    benchmarks/gpu_day.sh [PART ...]                                  # some or all, each within its time
    python benchmarks/gpu_parts.py trace gpu_day/trace.json [--quick]

--quick takes tiny sizes and the CPU, to see that everything runs; its seconds mean nothing.
"""

import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
import tomllib
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import gpu
import numpy as np
import torch
from common import machine_facts, paired
from torch.autograd import DeviceType

from aiscale import cost
from aiscale.config import write_whole
from aiscale.cost.compression import is_exempt
from aiscale.data import Batches
from aiscale.data.corpus import find_text
from aiscale.distributed import connect
from aiscale.meter import Meter, allocated_bytes, held_bytes
from aiscale.model.build import build_model
from aiscale.parallel import build
from aiscale.parallel.radius import mask
from aiscale.parallel.radius.reference import SimulatedRanks
from aiscale.recipes import recipe
from aiscale.study import run_study, summary
from aiscale.study.grid import STUDIES, study_of
from aiscale.verify.bytes import random_batch

ROOT, QUICK, RANKS = Path(__file__).resolve().parents[1], "--quick" in sys.argv, 4
DEVICE, SIZE, BATCH = ("cpu", "quick", 4) if QUICK else ("cuda", "124M", 32)
STEPS = (2, 1) if QUICK else (gpu.STEPS, gpu.WARMUP)  #: (timed, before them)
NEEDED = {"deepspeed": "zero", "megatron": "tp2"}  #: package -> the tests that need it have this in their names
NO_WORK = ("Optimizer.", "Context Sync", "Stream Sync", "Event Sync", "Stream Wait")  #: drawn on the GPU's line, too


def seconds(calls):
    timed = paired(calls, 5)
    return {name: timed.median_s(name) for name in calls}


def tests():
    """The tests marked gpu; those that have not ended in time are only in `collected`."""
    lacks = [package for package in NEEDED if not find_spec(package)]
    chosen = " and ".join(["test", *(f"not {NEEDED[package]}" for package in lacks)])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/test_gpu.py",
        "-v",
        "-n1" if QUICK else "-n4",
        "-m",
        "gpu",
        "-k",
        chosen,
        "--color=no",
    ]
    try:
        limit_s = float(os.environ.get("PART_S", 60)) - 8  # to write what has ended
        pipe = subprocess.PIPE
        log = subprocess.run(command, cwd=ROOT, stdout=pipe, timeout=limit_s).stdout.decode()
    except subprocess.TimeoutExpired as late:
        log = (late.stdout or b"").decode()
    print(log)
    ended = re.findall(r"\] ([A-Z]+) (tests/.+?) *$", log, re.M)
    counts = {"collected": re.findall(r"\[(\d+) items?\]", log), **Counter(word for word, _ in ended)}
    return {"lacks": lacks, "counts": counts, "others": [test for test in ended if test[0] != "PASSED"]}


def ours(size):
    """Tokens/s and MFU of the engine that `fit` uses."""
    run = speed_run(size)
    return gpu.measure_training(run, connect(DEVICE), *STEPS)


def speed_run(size):
    if QUICK:
        return gpu.training_run("quick", BATCH, compile=False, device=DEVICE)
    return gpu.training_run(size, gpu.BATCH[size], device=DEVICE)


def reference(size):
    """Tokens/s and MFU of a plain loop: bf16 autocast, torch.compile, fused AdamW, clipping, and no
    engine. The model is nanoGPT's where NANOGPT names its folder, else our GPT."""
    run = speed_run(size)
    tokens, targets = random_batch(run, 1)[0]
    model, about = plain_model(run)
    model = model.to(DEVICE)
    fused = {"fused": True} if DEVICE == "cuda" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, **fused)
    compiled = torch.compile(model) if run.loop.compile else model
    tokens, targets = tokens.to(DEVICE), targets.to(DEVICE)
    flops = cost.flops_per_token(run.model, run.loop.seq_len)
    meter = Meter(connect(DEVICE), flops_per_token=flops, precision="bf16")
    steps, warmup = STEPS
    rows = []
    for step in range(warmup + steps):
        with meter.step():
            with torch.autocast(DEVICE, torch.bfloat16):
                out = compiled(tokens, targets)
            loss = out[1] if isinstance(out, tuple) else out  # nanoGPT's gives (logits, loss)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if step >= warmup:
            rows.append(meter.record(tokens.numel()))
    step_s = statistics.median(row["step_s"] for row in rows)
    rate = tokens.numel() / step_s
    speed = {"step_s": step_s, "tokens_per_s": rate, "mfu": rate * flops / meter.peak_flops}
    facts = {"batch": run.loop.global_batch, "seq_len": run.loop.seq_len, "loss": loss.item()}
    return {"reference": about, **speed, **facts, "peak_flops": meter.peak_flops}


def plain_model(run):
    """(model, what it is)."""
    folder = os.environ.get("NANOGPT")
    if not folder:
        return build_model(run.model), "aiscale's GPT in a plain loop"
    sys.path.insert(0, str(Path(folder).expanduser()))
    from model import GPT, GPTConfig

    shape = {"n_layer": run.model.n_layer, "n_head": run.model.n_head, "n_embd": run.model.d_model}
    shape |= {"vocab_size": run.model.vocab_size, "block_size": run.loop.seq_len, "dropout": 0.0}
    return GPT(GPTConfig(**shape)), "nanoGPT's model.py in a plain loop"


def study():
    """`aiscale study node` without its cells of several ranks, and on a tenth of its text, so that a round fits."""
    tree = tomllib.loads((STUDIES / f"{'quick' if QUICK else 'node'}.toml").read_text())
    tree.pop("cross", None)
    tree["base"]["data_kib"] = 4 if QUICK else 450
    tree |= {"repeats": 1 if QUICK else 2, "cell_minutes": 1.2}
    rows = run_study(study_of(tree), ROOT / f"build/gpu_study_{SIZE}", 0.3 if QUICK else 6.5)
    return {"study": tree, "dates": [rows[0]["date"], rows[-1]["date"]], "cells": summary(rows)}


def kernels():
    """The GPT of workshop/from_scratch, on NumPy and on its own kernels; two of these beside torch's."""
    sys.path.insert(0, str(ROOT / "workshop"))  # before this folder, which has a from_scratch.py
    from from_scratch import gpu as stage2

    words, n = (["tiny", "--steps=4"], 8) if QUICK else (["full", "--steps=10"], 2048)
    runs = {"numpy": from_scratch(words[0], "--steps=3"), "gpu": from_scratch(*words, "--device=gpu")}
    host = np.random.default_rng(0).normal(size=(n, n)).astype(np.float32)
    x, y = stage2.to_device(host), torch.tensor(host, device=DEVICE)
    calls = {"product": lambda: stage2.matmul(x, x), "torch's product": lambda: y @ y, "GELU": lambda: stage2.gelu(x)}
    calls |= {"torch's GELU": lambda: torch.nn.functional.gelu(y, approximate="tanh")}
    calls |= {"a matrix to the GPU": lambda: stage2.to_device(host)}
    return {"recipe": words, "runs": runs, "matrix_side": n, "tile": stage2.TILE, "call_s": seconds(calls)}


def from_scratch(*words):
    """Losses, bytes moved and seconds of the steps, the first with compilation; lines are timed as they arrive."""
    command = [sys.executable, "-m", "from_scratch.train", *words]
    with subprocess.Popen(command, cwd=ROOT / "workshop", stdout=subprocess.PIPE, text=True) as job:
        stamped = [(line.strip(), time.perf_counter()) for line in job.stdout]
    if job.returncode:
        raise SystemExit(f"from_scratch.train {' '.join(words)} ended with status {job.returncode}")
    losses = [float(line.split()[3]) for line, _ in stamped if line.startswith("step")]
    step_s = np.diff([at for _, at in stamped])[: len(losses)].tolist()
    return {"losses": losses, "step_s": step_s, "last_line": stamped[-1][0]}


def radius():
    """Radius's own work on the gradient of GPT-2 355M, and simulated ranks that train in both precisions."""
    with torch.device("meta"):
        model = build_model(recipe("laptop" if QUICK else "gpt2-medium").model)
    sizes = [p.numel() for name, p in model.named_parameters() if not is_exempt(name)]
    rows = [radius_work(sizes, dtype, density) for dtype in ("float32", "bfloat16") for density in (0.4, 0.1)]
    runs = [simulated(method, *how) for method in ("none", "radius") for how in (("fp32", "same"), ("bf16", "bf16"))]
    return {"entries": sum(sizes), "work": rows, "ranks": RANKS, "training": runs}


def radius_work(sizes, dtype, density):
    scored = {i: torch.rand(n, device=DEVICE).to(getattr(torch, dtype)) for i, n in enumerate(sizes)}
    chosen = torch.cat(list(mask.choose(scored, density=density, reach=0).values()))
    k, gradient, residual = int(chosen.sum()), *(torch.cat(list(scored.values())) for _ in range(2))
    at = mask.positions(chosen, k)
    packed = mask.pack(gradient, at, residual)
    calls = {
        "choose": lambda: mask.choose(scored, density=density, reach=0),
        "positions": lambda: mask.positions(chosen, k),
        "pack": lambda: mask.pack(gradient, at, residual),
        "unpack": lambda: mask.unpack(gradient, at, packed),
        "add, to compare": lambda: residual.add_(gradient),
    }
    ns = {name: s / len(chosen) * 1e9 for name, s in seconds(calls).items()}
    return {"dtype": dtype, "density": density, "ns_per_entry": ns}


def simulated(method, precision, wire):
    """Trains the 10.7M model on bytes of Python's own sources; the last tenth is held out."""
    steps, nbytes, own = (4, 60_000, {"n_layer": 1, "n_head": 2, "d_model": 32}) if QUICK else (400, 8_000_000, {})
    settings = {f"model.{key}": value for key, value in {"vocab_size": 256, **own}.items()}
    settings |= {"parallel.strategy": "ddp", "loop.precision": precision}
    settings |= {"compression.method": method, "compression.wire": wire}
    settings |= {"compression.interval": 2 if QUICK else 50} if method == "radius" else {}
    run = recipe("gpt-c").override(*(f"{key}={value}" for key, value in settings.items()))
    text = "".join(find_text("stdlib").pieces())[:nbytes].encode("ascii", "replace")
    parts = np.split(np.frombuffer(text, np.uint8), [nbytes * 9 // 10])
    read, held_out = (Batches(part, seq_len=256, global_batch=16, seed=0) for part in parts)
    engine, losses, start = SimulatedRanks(run, RANKS, DEVICE), [], time.perf_counter()
    for step in range(steps):
        losses.append(engine.step([read.share(step, rank, RANKS) for rank in range(RANKS)], run.optimizer.lr).loss)
    step_s = (time.perf_counter() - start) / steps
    val_loss, _ = engine.evaluate(held_out.batch(i) for i in range(1 if QUICK else 20))
    return {"settings": settings, "losses": losses[:: max(1, steps // 20)], "val_loss": val_loss, "step_s": step_s}


def gpt2(*settings, compile=False):
    """Engine, micro-batches and a step's seconds of GPT-2 124M in bf16; --quick: of the tiny model."""
    gc.collect()  # the last engine's memory
    run = gpu.training_run(SIZE, BATCH, compile=compile, device=DEVICE).override(*settings)
    engine, batch = build(run, connect(DEVICE)), random_batch(run, 1)
    return engine, batch, paired({"": lambda: engine.step(batch, 1e-4)}, 5).median_s("")


def trace():
    """Three steps, eager and compiled: share of the time in which the GPU computes, and its longest kernels."""
    return {"batch": BATCH, "rows": [traced(compile) for compile in ([False] if QUICK else [False, True])]}


def traced(compile):
    engine, batch, step_s = gpt2(compile=compile)
    with torch.profiler.profile() as profiler:
        for _ in range(3):
            engine.step(batch, 1e-4)
    kind = DeviceType.CPU if QUICK else DeviceType.CUDA
    events = [e for e in profiler.events() if e.device_type == kind and not e.is_user_annotation]
    events = sorted((e for e in events if not e.name.startswith(NO_WORK)), key=lambda e: e.time_range.start)
    busy_us, reached, took, calls = 0.0, 0.0, Counter(), Counter(e.name for e in events)
    for e in events:
        busy_us += max(0.0, e.time_range.end - max(e.time_range.start, reached))  # those of two streams overlap
        reached = max(reached, e.time_range.end)
        took[e.name] += e.self_cpu_time_total if QUICK else e.time_range.elapsed_us()
    longest = [{"name": name[:120], "ms": us / 3e3, "calls": calls[name] / 3} for name, us in took.most_common(8)]
    # The profiler slows Python down, but not the kernels: so `busy` is their share of a step without it.
    busy = {"busy": busy_us / 3e6 / step_s, "busy_traced": busy_us / (reached - events[0].time_range.start)}
    return {"compile": compile, "step_s": step_s, **busy, "longest_a_step": longest}


def memory():
    """Peak bytes of each phase of a step, without and with activation checkpointing."""
    return {"batch": BATCH, "rows": [phases(checkpointing) for checkpointing in (False, True)]}


def phases(checkpointing):
    engine, batch, step_s = gpt2(f"model.activation_checkpointing={checkpointing}")
    engine._clear_gradients()
    held = sum(held_bytes(engine.tensors()).values())
    row, loss = {"activation_checkpointing": checkpointing, "step_s": step_s, "held_bytes": held}, []
    works = {"forward": lambda: loss.append(engine._forward(batch[0])), "backward": lambda: engine._backward(loss[0])}
    for phase, work in (works | {"optimizer": lambda: engine.update(1e-4)}).items():
        if QUICK:  # what torch's profiler sees allocated, beyond the engine's own tensors
            changes = allocated_bytes(work)[1]
            peak, held = held + max(0, *changes), held + changes[-1]
        else:
            torch.cuda.reset_peak_memory_stats()
            work()
            peak = torch.cuda.max_memory_allocated()
        row[f"{phase}_peak_bytes"] = peak
    return row


PARTS = {"tests": tests, "study": study, "kernels": kernels}
PARTS |= {"radius": radius, "trace": trace, "memory": memory}
for size in ("124M", "355M"):
    PARTS[f"gpt2_{size}"] = partial(ours, size)
    PARTS[f"reference_{size}"] = partial(reference, size)

if __name__ == "__main__":
    part, out = sys.argv[1:3]
    if not QUICK and not torch.cuda.is_available():
        raise SystemExit(f"{part} needs a GPU")
    result = {"quick": QUICK, **PARTS[part](), "machine": machine_facts()}
    write_whole(Path(out), json.dumps(result, indent=1) + "\n")
