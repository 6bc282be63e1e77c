"""Predicted and measured bytes side by side, for every strategy: `aiscale bench bytes`.

For each case (a strategy with its options) and world size, ranks train a tiny model for three steps. In the third step
each rank compares the bytes it sent, by collective and process group, and the bytes it holds, by category, with
`cost.step_traffic` and `cost.held_bytes`. Both must be equal to the byte.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from aiscale import cost
from aiscale.bench.ranks import BenchError, Report, on_ranks, random_batch, silent
from aiscale.bench.tables import check, heading, table
from aiscale.bench.timing import machine_facts
from aiscale.config import Run
from aiscale.distributed.starter import Starter
from aiscale.meter import held_bytes
from aiscale.parallel import build

CATEGORIES = ("parameters", "gradients", "optimizer states")

#: library -> the strategies that use it
_STRATEGIES = {"torch": ("ddp", "fsdp", "pipeline"), "deepspeed": ("zero",), "megatron": ("megatron",)}
_IMPORTS = "from aiscale.parallel import preload\nfor strategy in {strategies}:\n    preload(strategy)"
_TIMEOUT_S = 3600  #: all cases of one library at one world size
#: 67 tokens: a prime, so padding by a library shows up.
_MODEL = ("model.n_layer=4", "model.n_head=4", "model.d_model=32", "model.vocab_size=67", "model.max_seq_len=16")
_LOOP = ("loop.seq_len=16", "loop.micro_batch=1", "loop.device=cpu")


@dataclass(frozen=True)
class Case:
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

_EXPERTS = ("model.n_expert=4", "model.bias=false")
_RECOMPUTED = ("model.activation_checkpointing=true",)


def _megatron(name: str, worlds: tuple[int, ...], *layout: str, model: tuple[str, ...] = (), layers: int = 4) -> Case:
    settings = ("parallel.strategy=megatron", *(f"parallel.{option}" for option in layout))
    size = (f"model.n_layer={layers}",)
    return Case(f"megatron {name}", (*size, *model, *settings), worlds, 4, "megatron")


def _zero(name: str, worlds: tuple[int, ...], *layout: str, model: tuple[str, ...] = ()) -> Case:
    settings = ("parallel.strategy=zero", *(f"parallel.{option}" for option in layout), *model)
    return Case(f"zero {name}", settings, worlds, 2, "deepspeed")


def _pipeline(name: str, worlds: tuple[int, ...], *layout: str) -> Case:
    settings = ("parallel.strategy=pipeline", *(f"parallel.{option}" for option in layout))
    return Case(f"pipeline {name}", settings, worlds, 4)


def _compressed(method: str, worlds: tuple[int, ...], *options: str, name: str = "", zero1: bool = False) -> Case:
    """A compression method, whose third step is a sparse one."""
    settings = ("parallel.strategy=ddp", f"parallel.distributed_optimizer={str(zero1).lower()}")
    compression = (f"compression.{option}" for option in (f"method={method}", *options))
    return Case(f"ddp {name or method}{' zero1' * zero1}", (*settings, *compression), worlds)


_ALL = (2, 3, 4, 5, 6, 7, 8)
CASES = (
    Case("ddp", ("parallel.strategy=ddp",), _ALL),
    Case("ddp bf16", ("parallel.strategy=ddp", "compression.wire=bf16"), (2, 4)),
    Case("ddp at once", ("parallel.strategy=ddp", "compression.overlap=false"), (2,)),
    Case("ddp zero1", _ZERO1, (2, 3, 5)),
    _compressed("radius", (2, 3, 4)),
    _compressed("radius", (2,), "overlap=false", "wire=bf16", "residual=none", name="radius at once"),
    _compressed("radius", (3,), "density=0.1", zero1=True),
    _compressed("top-k", (2, 3, 4), "density=0.1"),
    _compressed("top-k", (2,), "wire=bf16", "residual=mean", name="top-k bf16"),
    _compressed("random-k", (2, 3), "density=0.1"),
    _compressed("random-k", (2,), "wire=bf16", name="random-k bf16"),
    _compressed("powersgd", (2, 3), "rank=2"),
    _compressed("powersgd", (2,), "rank=4", zero1=True),
    Case("fsdp", (_FSDP,), _ALL),
    Case("fsdp kept", (_FSDP, "parallel.reshard_after_forward=false"), (2, 4)),
    Case("fsdp hybrid", (_FSDP, "parallel.replicas=2"), (4, 8)),
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
    _megatron("ep2", (2, 4), "ep=2", model=_EXPERTS),
    _megatron("ep2 pp2", (4,), "ep=2", "pp=2", model=_EXPERTS),
    _megatron("ep2 recomputed bf16", (2,), "ep=2", model=(*_EXPERTS, *_RECOMPUTED, "loop.precision=bf16")),
    Case("ddp experts", ("parallel.strategy=ddp", *_EXPERTS), (2,)),
    Case("fsdp experts", (_FSDP, *_EXPERTS), (2,)),
    _zero("3 experts", (2,), "zero_stage=3", model=_EXPERTS),
    Case("fsdp llama", (_FSDP, *_LLAMA), (3,)),
    Case("fsdp muon deepnorm", (_FSDP, "optimizer.name=muon", "model.norm=deepnorm", "model.tied=false"), (3,)),
    Case("fsdp lamb t5", (_FSDP, "optimizer.name=lamb", "model.position=t5"), (2,)),
    Case("ddp zero1 adafactor", (*_ZERO1, "optimizer.name=adafactor", "model.position=shaw"), (3,)),
    Case("ddp zero1 muon", (*_ZERO1, "optimizer.name=muon"), (2,)),
    _megatron("tp2 sequence sinusoidal", (2,), "tp=2", "sequence_parallel=true", model=_SINUSOIDAL),
    Case("fsdp bf16", (_FSDP, "loop.precision=bf16"), (2, 3)),
)


def bench_bytes(*, quick: bool = False, report: Report = silent) -> dict:
    """Run every case at every world size (quick: the smallest only); rows as in `compare`."""
    plan = [(case, world) for case in CASES for world in (case.worlds[:1] if quick else case.worlds)]
    rows = compare(plan, report=report)
    wrong = sum(row["predicted"] != row["measured"] for row in rows)
    return {"rows": rows, "checks": [check("rows that differ", wrong, 0)], "machine": machine_facts()}


def compare(plan: Iterable[tuple[Case, int]], *, report: Report = silent) -> list[dict[str, str | int]]:
    """Rows {case, world_size, rank, kind (payload or held), what, predicted, measured} of cases at world sizes.

    One process imports each library; ranks are forked from it, a new set for each world size.
    """
    libraries: dict[str, dict[int, list[str]]] = {}
    for case, world_size in plan:
        libraries.setdefault(case.library, {}).setdefault(world_size, []).append(case.name)
    rows, env = [], {**os.environ, "OMP_NUM_THREADS": "1"}
    for library, worlds in libraries.items():
        report(f"{library}: " + ", ".join(f"{len(names)} cases on {n} ranks" for n, names in worlds.items()))
        with Starter(_IMPORTS.format(strategies=_STRATEGIES[library]), env=env) as starter:
            for n, names in worlds.items():
                done = starter.run(["-m", "aiscale.bench.bytes", str(n), *names], timeout=_TIMEOUT_S)
                if done.returncode:
                    raise BenchError(f"{library} on {n} ranks measured nothing: {done.stderr[-2000:]}")
                rows += json.loads(done.stdout.splitlines()[-1])
    return rows


def show_bytes(result: dict) -> None:
    """Print all rows of rank 0, and rows of other ranks that differ from their prediction."""
    heads = ("case", "ranks", "rank", "what", "predicted", "measured", "")
    shown = [
        (
            row["case"],
            str(row["world_size"]),
            str(row["rank"]),
            f"{row['kind']} {row['what']}",
            f"{row['predicted']:,}",
            f"{row['measured']:,}",
            "" if row["predicted"] == row["measured"] else "[red]differ",
        )
        for row in result["rows"]
        if row["rank"] == 0 or row["predicted"] != row["measured"]
    ]
    heading(result)
    table("bytes", heads, shown)
    print(f"{len(result['rows'])} rows of all ranks, {result['checks'][0]['value']} differ")


def measure(world, names: list[str]) -> list[dict]:
    """Runs on each rank: the rows of all ranks for the cases with these names."""
    torch.set_num_threads(1)
    everyone = world.gather([row for case in CASES if case.name in names for row in rows_of(case, world)])
    return [row for rows in everyone for row in rows]


def rows_of(case: Case, world) -> list[dict]:
    head = {"case": case.name, "world_size": world.size, "rank": world.rank}
    return [{**head, **row} for row in predicted_and_counted(case.run(world.size), world)]


def predicted_and_counted(run, world, steps: int = 3) -> list[dict]:
    """Rows {kind, what, predicted, measured, calls} of this rank in the last of `steps` steps. `world` may be one of
    `distributed.fake`; calls: of the collective, 0 for what is held."""
    sent, calls, held = _last_step(run, world, steps)
    sent_predicted = cost.step_traffic(run, world.size, world.rank)
    held_predicted = cost.held_bytes(run, world.size, world.rank)
    categories = (*CATEGORIES, *(["compression"] if "compression" in {**held, **held_predicted} else []))
    counted = [
        ("payload", f"{op} {group}", (op, group), sent_predicted, sent)
        for op, group in sorted({*sent, *sent_predicted})
    ]
    counted += [("held", what, what, held_predicted, held) for what in categories]
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
    sent, calls = Counter(), Counter()
    for (op, group), count in world.traffic.groups_since(before).items():
        if len(group.ranks) > 1:
            sent[op, group.name] += count.payload_bytes
            calls[op, group.name] += count.calls
    held = held_bytes(engine.held())
    engine.close()
    return sent, calls, held


if __name__ == "__main__":
    world_size, *case_names = sys.argv[1:]  # the ranks are forked from this process, which has imported their library
    print(json.dumps(on_ranks(int(world_size), "aiscale.bench.bytes:measure", case_names)))
