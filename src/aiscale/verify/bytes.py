"""The byte table: bytes that each strategy sends and holds, predicted and measured side by side.

    python -m aiscale.verify.bytes                  # all cases on all their world sizes; exit status 0 if none differs
    python -m aiscale.verify.bytes ddp 'zero 2'     # these cases; rows of rank 0, and all that differ

For each case and world size, ranks train a tiny model for three steps. In the third each compares the bytes it sent, by
collective and process group, and the bytes it holds, by category, with `cost`: both must be equal to the byte.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from aiscale import cost
from aiscale.config import Run
from aiscale.distributed import connect
from aiscale.launch import launch
from aiscale.meter import held_bytes
from aiscale.parallel import build

CATEGORIES = ("parameters", "gradients", "optimizer states")

#: library -> the modules of the strategies that use it
_STRATEGIES = {"torch": ("ddp", "fsdp", "pipeline"), "deepspeed": ("zero",), "megatron": ("megatron.core",)}
_TIMEOUT_S = 3600  #: all cases of one library at one world size
#: 67 tokens: a prime, so padding by a library shows up.
_MODEL = ("model.n_layer=4", "model.n_head=4", "model.d_model=32", "model.vocab_size=67", "model.max_seq_len=16")
_LOOP = ("loop.seq_len=16", "loop.micro_batch=1", "loop.device=cpu")


@dataclass(frozen=True)
class ByteCase:
    """A strategy with its options, and the world sizes at which it is measured."""

    name: str
    settings: tuple[str, ...]
    worlds: tuple[int, ...]
    micro_batches: int = 2  #: per data-parallel rank and step
    library: str = "torch"  #: cases of different libraries run in different processes, because libraries patch torch

    def run(self, world_size: int) -> Run:
        run = Run().override(*_MODEL, *_LOOP, *self.settings)
        dp = run.parallel.data_parallel(world_size)
        return run.override(f"loop.global_batch={dp * self.micro_batches}")


_FSDP = "parallel.strategy=fsdp"
_ZERO1 = ("parallel.strategy=ddp", "parallel.distributed_optimizer=true")
_SINUSOIDAL = ("model.position=sinusoidal", "model.activation=geglu", "optimizer.name=adam")
_LLAMA = ("model.norm=rmsnorm", "model.position=rotary", "model.activation=swiglu", "model.tied=false")

_RECOMPUTED = ("model.activation_checkpointing=true",)


def _megatron(
    name: str, worlds: tuple[int, ...], *layout: str, model: tuple[str, ...] = (), layers: int = 4
) -> ByteCase:
    settings = ("parallel.strategy=megatron", *(f"parallel.{option}" for option in layout))
    size = (f"model.n_layer={layers}",)
    return ByteCase(f"megatron {name}", (*size, *model, *settings), worlds, 4, "megatron")


def _zero(name: str, worlds: tuple[int, ...], *layout: str, model: tuple[str, ...] = ()) -> ByteCase:
    settings = ("parallel.strategy=zero", *(f"parallel.{option}" for option in layout), *model)
    return ByteCase(f"zero {name}", settings, worlds, 2, "deepspeed")


def _pipeline(name: str, worlds: tuple[int, ...], *layout: str) -> ByteCase:
    settings = ("parallel.strategy=pipeline", *(f"parallel.{option}" for option in layout))
    return ByteCase(f"pipeline {name}", settings, worlds, 4)


def _compressed(method: str, worlds: tuple[int, ...], *options: str, name: str = "", zero1: bool = False) -> ByteCase:
    """A compression method, whose third step is a sparse one."""
    settings = ("parallel.strategy=ddp", f"parallel.distributed_optimizer={str(zero1).lower()}")
    compression = (f"compression.{option}" for option in (f"method={method}", *options))
    return ByteCase(f"ddp {name or method}{' zero1' * zero1}", (*settings, *compression), worlds)


_ALL = (2, 3, 4, 5, 6, 7, 8)
BYTE_CASES = (
    ByteCase("ddp", ("parallel.strategy=ddp",), _ALL),
    ByteCase("ddp bf16", ("parallel.strategy=ddp", "compression.wire=bf16"), (2, 4)),
    ByteCase("ddp at once", ("parallel.strategy=ddp", "compression.overlap=false"), (2,)),
    ByteCase("ddp zero1", _ZERO1, (2, 3, 5)),
    _compressed("radius", (2, 3, 4)),
    _compressed("radius", (2,), "overlap=false", "wire=bf16", "residual=none", name="radius at once"),
    _compressed("top-k", (2, 3, 4), "density=0.1"),
    _compressed("top-k", (2,), "wire=bf16", name="top-k bf16"),
    _compressed("powersgd", (2, 3), "rank=2"),
    _compressed("powersgd", (2,), "rank=4", zero1=True),
    ByteCase("fsdp", (_FSDP,), _ALL),
    ByteCase("fsdp kept", (_FSDP, "parallel.reshard_after_forward=false"), (2, 4)),
    ByteCase("fsdp hybrid", (_FSDP, "parallel.replicas=2"), (4, 8)),
    _zero("0", _ALL, "zero_stage=0"),
    _zero("1", _ALL, "zero_stage=1"),
    _zero("2", _ALL, "zero_stage=2"),
    _zero("3", _ALL, "zero_stage=3"),
    _zero("1 bf16", (2,), "zero_stage=1", model=("loop.precision=bf16",)),
    _zero("2 bf16", (3,), "zero_stage=2", model=("loop.precision=bf16",)),
    _zero("3 bf16", (4,), "zero_stage=3", model=("loop.precision=bf16",)),
    _zero("3 recomputed", (2,), "zero_stage=3", model=("model.activation_checkpointing=true",)),
    _zero("2 offload", (2,), "zero_stage=2", "offload=optimizer"),
    _zero("3 offload", (2,), "zero_stage=3", "offload=all"),
    _pipeline("gpipe", (2,), "pp=2", "schedule=gpipe"),
    _pipeline("1f1b", (2, 4), "pp=2"),
    _pipeline("interleaved", (2, 4), "pp=2", "virtual_stages=2", "schedule=interleaved"),
    _megatron("tp2", (2, 4), "tp=2"),
    _megatron("tp2 sequence", (2,), "tp=2", "sequence_parallel=true"),
    _megatron("tp4 sequence rotary", (4,), "tp=4", "sequence_parallel=true", model=_LLAMA),
    _megatron("tp2 recomputed", (2,), "tp=2", model=("model.activation_checkpointing=true",)),
    _megatron("pp2", (2, 4), "pp=2"),
    _megatron("pp4 interleaved", (4,), "pp=4", "virtual_stages=2", "schedule=interleaved", layers=8),
    _megatron("dp distributed", (2, 3, 4), "distributed_optimizer=true"),
    _megatron("dp distributed bf16", (2,), "distributed_optimizer=true", model=("loop.precision=bf16",)),
    _megatron("pp2 distributed", (2,), "pp=2", "distributed_optimizer=true"),
    _megatron("tp2 pp2 bf16", (4,), "tp=2", "pp=2", model=("loop.precision=bf16",)),
    _megatron("tp2 pp2 dp2 distributed", (8,), "tp=2", "pp=2", "distributed_optimizer=true"),
    _megatron("tp2 pp2 dp2 sequence", (8,), "tp=2", "pp=2", "sequence_parallel=true"),
    ByteCase("fsdp llama", (_FSDP, *_LLAMA), (3,)),
    ByteCase("fsdp muon deepnorm", (_FSDP, "optimizer.name=muon", "model.norm=deepnorm", "model.tied=false"), (3,)),
    ByteCase("fsdp lamb t5", (_FSDP, "optimizer.name=lamb", "model.position=t5"), (2,)),
    ByteCase("ddp zero1 adafactor", (*_ZERO1, "optimizer.name=adafactor", "model.position=shaw"), (3,)),
    ByteCase("ddp zero1 muon", (*_ZERO1, "optimizer.name=muon"), (2,)),
    _megatron("tp2 sequence sinusoidal", (2,), "tp=2", "sequence_parallel=true", model=_SINUSOIDAL),
    ByteCase("fsdp bf16", (_FSDP, "loop.precision=bf16"), (2, 3)),
)


def compare(plan: Iterable[tuple[ByteCase, int]]) -> list[dict[str, str | int]]:
    """Rows {case, world_size, rank, kind (payload or held), what, predicted, measured} of cases at world sizes. One
    process imports each library; ranks are forked from it."""
    libraries: dict[str, dict[int, list[str]]] = {}
    for case, world_size in plan:
        libraries.setdefault(case.library, {}).setdefault(world_size, []).append(case.name)
    rows, env = [], {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        for library, worlds in libraries.items():
            out = Path(folder, f"{library}.jsonl")
            command = [sys.executable, "-m", "aiscale.verify.bytes", "--measure", library, str(out), json.dumps(worlds)]
            subprocess.run(command, env=env, check=True, timeout=_TIMEOUT_S)
            rows += [row for line in out.read_text().splitlines() for row in json.loads(line)]
    return rows


def _measure(library: str, out: str, worlds: dict[str, list[str]]) -> int:
    """Append a line to `out` for each world size: the rows of all its ranks."""
    for n, names in worlds.items():
        argv = ["-m", "aiscale.verify.bytes", "--rank", out, *names]
        needed = ["torch._dynamo", *(f"aiscale.parallel.{strategy}" for strategy in _STRATEGIES[library])]
        if status := launch(int(n), argv, preload=needed):
            return status
    return 0


def _rank(out: str, *names: str) -> None:
    torch.set_num_threads(1)
    world = connect("cpu")
    everyone = world.gather([row for case in BYTE_CASES if case.name in names for row in rows_of(case, world)])
    if world.is_main:
        with open(out, "a") as file:
            file.write(json.dumps([row for rows in everyone for row in rows]) + "\n")
    world.close()


def rows_of(case: ByteCase, world) -> list[dict]:
    head = {"case": case.name, "world_size": world.size, "rank": world.rank}
    return [{**head, **row} for row in predicted_and_counted(case.run(world.size), world)]


def predicted_and_counted(run, world, steps: int = 3) -> list[dict]:
    """Rows {kind, what, predicted, measured, calls} of this rank in the last of `steps` steps. `world` may be one of
    `distributed.fake`; calls: of the collective, 0 for what is held."""
    traffic, calls, tensor_bytes = _last_step(run, world, steps)
    predicted_traffic = cost.step_traffic(run, world.size, world.rank)
    predicted_bytes = cost.held_bytes(run, world.size, world.rank)
    categories = (*CATEGORIES, *(["compression"] if "compression" in {**tensor_bytes, **predicted_bytes} else []))
    counted = [
        ("payload", f"{op} {group}", (op, group), predicted_traffic, traffic)
        for op, group in sorted({*traffic, *predicted_traffic})
    ]
    counted += [("held", what, what, predicted_bytes, tensor_bytes) for what in categories]
    return [
        {"kind": kind, "what": what, "predicted": predicted.get(key, 0), "measured": measured.get(key, 0)}
        | {"calls": calls[key]}
        for kind, what, key, predicted, measured in counted
    ]


def _last_step(run, world, steps: int) -> tuple[Counter, Counter, dict]:
    """(payload bytes and calls by (collective, group) of the last step, bytes held after it by category)."""
    engine = build(run, world)
    torch.manual_seed(engine.data_rank)
    batch = random_batch(run, engine.data_world)
    for _ in range(steps):  # the first steps are set-up: DDP rebuilds its buckets, AdamW creates its states
        before = world.traffic.groups()
        engine.step(batch, 1e-3)
    traffic, calls = Counter(), Counter()
    for (op, group), count in world.traffic.groups_since(before).items():
        if len(group.ranks) > 1:
            traffic[op, group.name] += count.payload_bytes
            calls[op, group.name] += count.calls
    tensor_bytes = held_bytes(engine.tensors())
    engine.close()
    return traffic, calls, tensor_bytes


def random_batch(run: Run, data_world: int) -> list:
    """One step's micro-batches of random tokens, for one of `data_world` data-parallel ranks."""
    n_micro, size = run.loop.micro_batches(data_world)
    tokens = torch.randint(0, run.model.vocab_size, (n_micro, size, run.loop.seq_len + 1))
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]


def main(names: list[str]) -> int:
    """Print the rows of these cases, or of all."""
    rows = compare((case, n) for case in BYTE_CASES if not names or case.name in names for n in case.worlds)
    for row in rows:
        differs = row["predicted"] != row["measured"]
        if row["rank"] == 0 or differs:
            where = f"{row['case']:30} rank {row['rank']} of {row['world_size']}  {row['kind']} {row['what']:24}"
            print(f"{where} {row['predicted']:9,} predicted {row['measured']:9,} measured", "DIFFERS" * differs)
    wrong = sum(row["predicted"] != row["measured"] for row in rows)
    print(f"{len(rows)} rows of all ranks, {wrong} differ")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        _rank(*sys.argv[2:])
    elif sys.argv[1:2] == ["--measure"]:
        raise SystemExit(_measure(*sys.argv[2:4], json.loads(sys.argv[4])))
    else:
        raise SystemExit(main(sys.argv[1:]))
