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


_SHARDED = "distributed_optimizer=true"
_SEQUENCE = "tp=2 sequence_parallel=true"
_LLAMA = "model.norm=rmsnorm model.position=rotary model.activation=swiglu model.tied=false"
_RECOMPUTED = "model.activation_checkpointing=true"
_BF16 = "loop.precision=bf16"
_LIBRARIES = {"zero": "deepspeed", "megatron": "megatron"}


def _case(strategy: str, name: str, worlds: tuple[int, ...], options: str = "") -> ByteCase:
    """options: keys of parallel, "tp=2 pp=2", and full keys, "loop.micro_batch=3"."""
    words = [word if "." in word.partition("=")[0] else f"parallel.{word}" for word in options.split()]
    micro_batches = 4 if strategy in ("pipeline", "megatron") else 2
    library = _LIBRARIES.get(strategy, "torch")
    settings = (f"parallel.strategy={strategy}", *words)
    return ByteCase(f"{strategy} {name}".strip(), settings, worlds, micro_batches, library)


_ALL = (2, 3, 4, 5, 6, 7, 8)
BYTE_CASES = (
    _case("ddp", "", _ALL),
    _case("ddp", "bf16", (2, 4), "compression.wire=bf16"),
    _case("ddp", "at once", (2,), "compression.overlap=false"),
    _case("ddp", "zero1", (2, 3, 5), _SHARDED),
    _case("ddp", "radius", (2, 3, 4), "compression.method=radius"),
    _case(
        "ddp",
        "radius at once",
        (2,),
        "compression.method=radius compression.overlap=false compression.wire=bf16 compression.residual=none",
    ),
    _case("ddp", "top-k", (2, 3, 4), "compression.method=top-k compression.density=0.1"),
    _case("ddp", "top-k bf16", (2,), "compression.method=top-k compression.wire=bf16"),
    _case("ddp", "powersgd", (2, 3), "compression.method=powersgd compression.rank=2"),
    _case("ddp", "powersgd zero1", (2,), f"compression.method=powersgd compression.rank=4 {_SHARDED}"),
    _case("fsdp", "", _ALL),
    _case("fsdp", "kept", (2, 4), "reshard_after_forward=false"),
    _case("fsdp", "hybrid", (4, 8), "replicas=2"),
    *(_case("zero", str(stage), _ALL, f"zero_stage={stage}") for stage in range(4)),
    *(_case("zero", f"{stage} bf16", (stage + 1,), f"zero_stage={stage} {_BF16}") for stage in (1, 2, 3)),
    _case("zero", "3 recomputed", (2,), f"zero_stage=3 {_RECOMPUTED}"),
    _case("pipeline", "gpipe", (2,), "pp=2 schedule=gpipe"),
    _case("pipeline", "1f1b", (2, 4), "pp=2"),
    _case("pipeline", "interleaved", (2, 4), "pp=2 virtual_stages=2 schedule=interleaved"),
    _case("megatron", "tp2", (2, 4), "tp=2"),
    _case("megatron", "tp2 sequence", (2,), _SEQUENCE),
    _case("megatron", "tp4 sequence rotary", (4,), f"tp=4 sequence_parallel=true {_LLAMA}"),
    _case("megatron", "tp2 recomputed", (2,), f"tp=2 {_RECOMPUTED}"),
    _case("megatron", "pp2", (2, 4), "pp=2"),
    _case("megatron", "pp4 interleaved", (4,), "pp=4 virtual_stages=2 schedule=interleaved model.n_layer=8"),
    _case("megatron", "dp distributed", (2, 3, 4), _SHARDED),
    _case("megatron", "dp distributed bf16", (2,), f"{_SHARDED} {_BF16}"),
    _case("megatron", "pp2 distributed", (2,), f"pp=2 {_SHARDED}"),
    _case("megatron", "tp2 pp2 bf16", (4,), f"tp=2 pp=2 {_BF16}"),
    _case("megatron", "tp2 pp2 dp2 distributed", (8,), f"tp=2 pp=2 {_SHARDED}"),
    _case("megatron", "tp2 pp2 dp2 sequence", (8,), f"{_SEQUENCE} pp=2"),
    _case("fsdp", "llama", (3,), _LLAMA),
    _case("fsdp", "muon deepnorm", (3,), "optimizer.name=muon model.norm=deepnorm model.tied=false"),
    _case("fsdp", "lamb t5", (2,), "optimizer.name=lamb model.position=t5"),
    _case("ddp", "zero1 adafactor", (3,), f"{_SHARDED} optimizer.name=adafactor model.position=shaw"),
    _case("ddp", "zero1 muon", (2,), f"{_SHARDED} optimizer.name=muon"),
    _case("fsdp", "bf16", (2, 3), _BF16),
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
