"""The parts of a day on one GPU: small JSON files in the form of aiscale/plan/published/measured.

    benchmarks/gpu_day.sh [PART ...]                             # some or all, each within its time
    python benchmarks/gpu_parts.py trace gpu_day/trace.json [--quick]

--quick takes tiny sizes and the CPU, to see that everything runs; its seconds mean nothing.

One GPU holds one rank, so nothing here measures an exchange between GPUs: the traces of DDP and
FSDP show where they would send, and what their hooks cost.
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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from ways import Bucket, SimulatedRanks, make

from aiscale.errors import write_whole
from aiscale.measure.distributed import connect
from aiscale.measure.meter import allocated_bytes, held_bytes
from aiscale.measure.study import run_study, summary
from aiscale.measure.study.grid import STUDIES, study_of
from aiscale.train.data import Windows, batches
from aiscale.train.model import build, draw, loss_of
from aiscale.train.optimizer import make_optimizer
from aiscale.train.options import options
from aiscale.train.prepare.corpus import find_text
from aiscale.train.presets import shape_of

ROOT, QUICK, RANKS = Path(__file__).resolve().parents[1], "--quick" in sys.argv, 4
DEVICE, SIZE, BATCH = ("cpu", "quick", 4) if QUICK else ("cuda", "124M", 32)
STEPS = (2, 1) if QUICK else (gpu.STEPS, 5)  #: (timed, before them)
#: package -> the tests that need it have this in their names
NEEDED = {"deepspeed": "zero", "megatron": "tp2"}
#: the trainer whose speed is measured
TRAINER = {"124M": "ddp", "355M": "fsdp"}
DENSITIES = (0.9, 0.5, 0.4, 0.1)  #: of Radius, as published
#: drawn on the GPU's line, too
NO_WORK = ("Optimizer.", "Context Sync", "Stream Sync", "Event Sync", "Stream Wait")


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
    counts = {
        "collected": re.findall(r"\[(\d+) items?\]", log),
        **Counter(word for word, _ in ended),
    }
    return {
        "lacks": lacks,
        "counts": counts,
        "others": [test for test in ended if test[0] != "PASSED"],
    }


def ours(size):
    """Tokens/s and MFU of the trainer ddp or fsdp, on the one rank that a GPU holds."""
    cell = speed_cell(size) | {"strategy": TRAINER[size]}
    return {"trainer": TRAINER[size], **gpu.measure_training(cell)}


def speed_cell(size):
    if QUICK:
        return gpu.cell_of("quick", BATCH, STEPS[0], compile=False)
    return gpu.cell_of(size)


class Plain:
    """A model and a plain loop over random tokens: bf16 autocast, AdamW, clipping."""

    def __init__(self, model, batch, length, vocabulary, compile=False):
        self.model = model
        fused = {"fused": True} if DEVICE == "cuda" else {}
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, **fused)
        self.called = torch.compile(model) if compile else model
        rows = torch.randint(0, vocabulary, (batch, length + 1), device=DEVICE)
        self.tokens, self.targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def forward(self):
        with torch.autocast(DEVICE, torch.bfloat16):
            out = self.called(self.tokens, self.targets)
            return out[1] if isinstance(out, tuple) else out  # nanoGPT's gives (logits, loss)

    def update(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self):
        loss = self.forward()
        loss.backward()
        self.update()
        return loss


class WithLoss(torch.nn.Module):
    """The trainers' GPT, and the loss of its logits."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, tokens, targets):
        return loss_of(self.inner(tokens), targets)


def our_gpt(cell, recompute=False):
    words = [f"--model={cell['size']}", *(["--recompute"] if recompute else [])]
    args = options().parse_args(words)
    return WithLoss(draw(build(args), args, torch.device(DEVICE)))


def reference(size):
    """Tokens/s and MFU of a plain loop with torch.compile and fused AdamW.
    The model is nanoGPT's where NANOGPT names its folder, else the trainers' GPT."""
    cell = speed_cell(size)
    shape, length = shape_of(cell["size"]), cell["length"]
    model, about = plain_model(cell, shape)
    plain = Plain(model.to(DEVICE), cell["batch"], length, shape.vocabulary, cell["compile"])
    timed, warm_up = STEPS
    took = []
    for _ in range(warm_up + timed):
        began = time.perf_counter()
        loss = plain.step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    step_s, (peak, _) = statistics.median(took[warm_up:]), gpu.peak_of("bf16")
    rate = cell["batch"] * length / step_s
    speed = {
        "step_s": step_s,
        "tokens_per_s": rate,
        "mfu": rate * shape.flops_per_token(length) / peak,
    }
    facts = {"batch": cell["batch"], "seq_len": length, "loss": loss.item()}
    return {"reference": about, **speed, **facts, "peak_flops": peak}


def plain_model(cell, shape):
    """(model, what it is)."""
    folder = os.environ.get("NANOGPT")
    if not folder:
        return our_gpt(cell), "aiscale's GPT in a plain loop"
    sys.path.insert(0, str(Path(folder).expanduser()))
    from model import GPT, GPTConfig

    sizes = {"n_layer": shape.layers, "n_head": shape.heads, "n_embd": shape.width}
    sizes |= {"vocab_size": shape.vocabulary, "block_size": cell["length"], "dropout": 0.0}
    return GPT(GPTConfig(**sizes)), "nanoGPT's model.py in a plain loop"


def study():
    """`aiscale study node` without cells of several ranks, on a tenth of its text: a round fits."""
    tree = tomllib.loads((STUDIES / f"{'quick' if QUICK else 'node'}.toml").read_text())
    tree.pop("cross", None)
    tree["base"]["data_kib"] = 4 if QUICK else 450
    tree |= {"repeats": 1 if QUICK else 2, "cell_minutes": 1.2}
    rows = run_study(study_of(tree), ROOT / f"build/gpu_study_{SIZE}", 0.3 if QUICK else 6.5)
    return {"study": tree, "dates": [rows[0]["date"], rows[-1]["date"]], "cells": summary(rows)}


def kernels():
    """The GPT of workshop/from_scratch: an epoch on its kernels, three steps on NumPy.
    Two kernels beside torch's."""
    sys.path.insert(0, str(ROOT / "workshop"))  # before this folder, which has a from_scratch.py
    from from_scratch import gpu as stage2

    words, n = (["tiny", "--steps=4"], 8) if QUICK else (["full", "--epochs=1"], 2048)
    runs = {
        "numpy": from_scratch(words[0], "--steps=3"),
        "gpu": from_scratch(*words, "--device=gpu"),
    }
    host = np.random.default_rng(0).normal(size=(n, n)).astype(np.float32)
    x, y = stage2.to_device(host), torch.tensor(host, device=DEVICE)
    calls = {
        "product": lambda: stage2.matmul(x, x),
        "torch's product": lambda: y @ y,
        "GELU": lambda: stage2.gelu(x),
    }
    calls |= {"torch's GELU": lambda: torch.nn.functional.gelu(y, approximate="tanh")}
    calls |= {"a matrix to the GPU": lambda: stage2.to_device(host)}
    return {
        "recipe": words,
        "runs": runs,
        "matrix_side": n,
        "tile": stage2.TILE,
        "call_s": seconds(calls),
    }


def from_scratch(*words):
    """Losses, bytes moved and seconds of the steps, the first with compilation.
    Lines are timed as they arrive."""
    command = [sys.executable, "-m", "from_scratch.train", *words]
    with subprocess.Popen(command, cwd=ROOT / "workshop", stdout=subprocess.PIPE, text=True) as job:
        stamped = [(line.strip(), time.perf_counter()) for line in job.stdout]
    if job.returncode:
        raise SystemExit(f"from_scratch.train {' '.join(words)} ended with status {job.returncode}")
    losses = [float(line.split()[3]) for line, _ in stamped if line.startswith("step")]
    step_s = np.diff([at for _, at in stamped])[: len(losses)].tolist()
    return {"losses": losses, "step_s": step_s, "last_line": stamped[-1][0]}


def radius():
    """Radius' own work on the gradient of GPT-2 355M, steps of it by density in simulated ranks,
    and a smaller model that learns in both precisions."""
    world = connect(DEVICE)
    args = options().parse_args([f"--model={'laptop' if QUICK else 'gpt2-medium'}"])
    model = draw(build(args), args, world.device)
    optimizer = make_optimizer(model, args)
    rows = [radius_work(model, optimizer, density) for density in (0.4, 0.1)]
    entries = sum(p.numel() for p in model.parameters())
    length = 32 if QUICK else 1024
    steps = [simulated_step(model, optimizer, length, density) for density in (None, *DENSITIES)]
    del model, optimizer
    gc.collect()
    ways = [("fp32", False), ("bf16", True)]
    runs = [simulated(method, *way) for method in ("dense", "radius") for way in ways]
    world.close()
    return {"entries": entries, "work": rows, "ranks": RANKS, "steps": steps, "training": runs}


def radius_work(model, optimizer, density):
    """Nanoseconds an entry: a new choice, and a sparse step's hook, which has nobody to send to."""
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    way, bucket = make("radius", model, density=density, interval=10**9), Bucket(model.parameters())
    way.after_step(optimizer)

    def choose():
        way.step = 0
        way.after_step(optimizer)

    calls = {"sparse hook": lambda: way.hook(None, bucket).wait(), "choose": choose}
    calls["add, to compare"] = lambda: bucket.flat.add_(bucket.flat)
    ns = {name: s / len(bucket.flat) * 1e9 for name, s in seconds(calls).items()}
    return {"density": density, "ns_per_entry": ns}


def simulated_step(model, optimizer, length, density):
    """Seconds of a step of simulated ranks, a sequence of tokens each; without a density, dense."""
    method, about = ("dense", {}) if density is None else ("radius", {"density": density})
    ways = [make(method, model, interval=10**9, **about) for _ in range(RANKS)]
    ranks = SimulatedRanks(model, optimizer, ways, "bf16")
    shares = [torch.randint(256, (1, length + 1), device=DEVICE) for _ in range(RANKS)]
    ranks.step(shares)  # dense: it chooses the entries that the next ones send
    timed = paired({"": lambda: ranks.step(shares)}, 1 if QUICK else 5)
    return {"density": density or 1.0, "method": method, "step_s": timed.median_s("")}


def simulated(method, precision, bf16):
    """Trains the 10.7M model on bytes of Python's own sources; the last tenth is held out."""
    steps, nbytes, name = (4, 60_000, "1x32") if QUICK else (400, 8_000_000, "gpt-c")
    length = min(256, shape_of(name).context)
    text = "".join(find_text("stdlib"))[:nbytes].encode("ascii", "replace")
    parts = np.split(np.frombuffer(text, np.uint8), [nbytes * 9 // 10])
    read, held_out = (Windows(part, length) for part in parts)
    args = options().parse_args([f"--model={name}", "--lr=3e-4", f"--steps={steps}"])
    model = draw(build(args), args, torch.device(DEVICE))
    about = {"interval": 2 if QUICK else 50, "bf16": bf16}
    ways = [make(method, model, **about) for _ in range(RANKS)]
    ranks = SimulatedRanks(model, make_optimizer(model, args), ways, precision)

    losses, start = [], time.perf_counter()
    for _, batch in batches(read, 0, args, 0, 1):
        losses.append(ranks.step([batch[rank::RANKS].to(DEVICE) for rank in range(RANKS)]))
    step_s = (time.perf_counter() - start) / steps
    unseen = held_out[torch.arange(args.batch * (1 if QUICK else 20))].to(DEVICE)
    val_loss = ranks.evaluate(unseen.split(args.batch))
    settings = {"method": method, "model": name, "precision": precision, **about}
    return {
        "settings": settings,
        "losses": losses[:: max(1, steps // 20)],
        "val_loss": val_loss,
        "step_s": step_s,
    }


def gpt2(recompute=False, compile=False):
    """A plain loop, and a step's seconds, of GPT-2 124M in bf16; --quick: of the tiny model."""
    gc.collect()  # the last one's memory
    cell = gpu.cell_of(SIZE, BATCH)
    vocabulary = shape_of(cell["size"]).vocabulary
    plain = Plain(our_gpt(cell, recompute), BATCH, cell["length"], vocabulary, compile)
    return plain, paired({"": plain.step}, 5).median_s("")


def trace():
    """Three steps each: a plain loop, eager and compiled, and the steps of DDP and FSDP.

    The share of time that the GPU computes, and the longest kernels. The traces themselves lie
    beside the JSON, for ui.perfetto.dev.
    """
    rows = [plain_trace(compile) for compile in ([False] if QUICK else [False, True])]
    world = connect(DEVICE)
    strategies = [strategy_trace(name) for name in ("ddp", "fsdp")]
    world.close()
    return {"batch": BATCH, "rows": rows, "strategies": strategies}


def plain_trace(compile):
    plain, step_s = gpt2(compile=compile)
    return {"compile": compile, **profiled(plain.step, step_s, "compiled" if compile else "eager")}


def strategy_trace(name):
    """A rank's step, wrapped as the trainer of that name wraps the model."""
    gc.collect()
    cell = gpu.cell_of(SIZE, BATCH)
    args = options().parse_args([f"--model={cell['size']}"])
    if name == "fsdp":
        model = build(args)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        model = draw(fully_shard(model, mp_policy=policy), args, torch.device(DEVICE))
    else:
        model = draw(build(args), args, torch.device(DEVICE))
        model.forward = torch.autocast(DEVICE, torch.bfloat16)(model.forward)
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = make_optimizer(model, args)
    vocabulary, length = shape_of(cell["size"]).vocabulary, cell["length"]
    rows = torch.randint(0, vocabulary, (BATCH, length + 1), device=DEVICE)

    def step():
        loss_of(model(rows[:, :-1]), rows[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step_s = paired({"": step}, 5).median_s("")
    return {"strategy": name, **profiled(step, step_s, name)}


def profiled(step, step_s, name):
    """Three steps under torch's profiler, whose trace lies in trace_NAME.json.gz."""
    with torch.profiler.profile() as profiler:
        for _ in range(3):
            step()
    profiler.export_chrome_trace(str(Path(sys.argv[2]).with_name(f"trace_{name}.json.gz")))
    kind = DeviceType.CPU if QUICK else DeviceType.CUDA
    events = [e for e in profiler.events() if e.device_type == kind and not e.is_user_annotation]
    events = sorted(
        (e for e in events if not e.name.startswith(NO_WORK)), key=lambda e: e.time_range.start
    )
    busy_us, reached, took, calls = 0.0, 0.0, Counter(), Counter(e.name for e in events)
    for e in events:
        # those of two streams overlap
        busy_us += max(0.0, e.time_range.end - max(e.time_range.start, reached))
        reached = max(reached, e.time_range.end)
        took[e.name] += e.self_cpu_time_total if QUICK else e.time_range.elapsed_us()
    longest = [
        {"name": name[:120], "ms": us / 3e3, "calls": calls[name] / 3}
        for name, us in took.most_common(8)
    ]
    # The profiler slows Python down, but not the kernels: so `busy` is their share of a step
    # without it.
    busy = {
        "busy": busy_us / 3e6 / step_s,
        "busy_traced": busy_us / (reached - events[0].time_range.start),
    }
    return {"step_s": step_s, **busy, "longest_a_step": longest}


def memory():
    """Peak bytes of each phase of a step, without and with activation checkpointing.

    On a GPU a snapshot of all allocations of the last step lies beside the JSON, for
    pytorch.org/memory_viz.
    """
    rows = [phases(recompute) for recompute in (False, True)]
    if not QUICK:
        plain, _ = gpt2()
        torch.cuda.memory._record_memory_history()
        plain.step()
        torch.cuda.memory._dump_snapshot(str(Path(sys.argv[2]).with_name("memory.pickle")))
    return {"batch": BATCH, "rows": rows}


def phases(recompute):
    plain, step_s = gpt2(recompute)
    states = [each for state in plain.optimizer.state.values() for each in state.values()]
    held = sum(held_bytes({"": [*plain.model.parameters(), *states]}).values())
    row, loss = {"recompute": recompute, "step_s": step_s, "held_bytes": held}, []
    works = {
        "forward": lambda: loss.append(plain.forward()),
        "backward": lambda: loss[0].backward(),
    }
    for phase, work in (works | {"optimizer": plain.update}).items():
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
