"""The byte table: bytes that each trainer sends and holds, predicted and measured side by side.

    python -m aiscale.measure.bytes                  # all cases; exit status 0 if no row differs
    python -m aiscale.measure.bytes ddp 'zero 2'     # these; rows of rank 0, and all that differ

Ranks run a trainer for three steps on a tiny model. In the third each compares what it sent, by
collective and process group, and what it holds, by category, with `cost`: equal to the byte. The
trainer is not changed: its process group counts, and a step ends where it logs. Two things are
left out: what `Job.log` sends, whether a rank was told to stop or must save; and the check of
Radius that all ranks have chosen the same entries.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import runpy
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from aiscale.measure.beside import beside, tp_pp_held
from aiscale.measure.cases import TINY_DEEPSPEED
from aiscale.measure.distributed import wire
from aiscale.measure.distributed.counter import Traffic
from aiscale.measure.distributed.link import Link
from aiscale.measure.holding import Holding, instances
from aiscale.plan import cost
from aiscale.plan.options import run_of
from aiscale.processes import start_python

CATEGORIES = ("parameters", "gradients", "optimizer states")
STEPS = 3  #: the first ones are set-up: DDP rebuilds its buckets, AdamW makes its states
_TIMEOUT_S = 600
_NEEDED = ["torch._dynamo", "torch.distributed.checkpoint", "aiscale.measure.meter"]


@dataclass(frozen=True)
class ByteCase:
    """A trainer with its options, and the world sizes at which it is measured."""

    name: str
    options: str = ""
    worlds: tuple[int, ...] = (2,)
    micro_batches: int = 2  #: of one copy of the model in a step
    model: str = "odd"

    @property
    def trainer(self) -> str:
        return self.name.split()[0]

    def words(self, world_size: int) -> list[str]:
        """The trainer's command line."""
        own = self.options.split()
        copies = world_size
        for option in ("--tp", "--pp"):
            copies //= int(own[own.index(option) + 1]) if option in own else 1
        words = ["--model", self.model, "--length", "16", "--micro-batch", "1", "--save-every", "0"]
        words += ["--batch", str(copies * self.micro_batches), "--steps", str(STEPS)]
        words += ["--config", str(TINY_DEEPSPEED)] if self.trainer == "zero" else []
        return words + own


_ALL = (2, 3, 4, 5, 6, 7, 8)
_FEW = (2, 3, 8)
BYTE_CASES = (
    ByteCase("serial", worlds=(1,)),
    ByteCase("ddp", worlds=_ALL),
    ByteCase("ddp untied", model="tiny"),
    ByteCase("fsdp", worlds=_ALL),
    ByteCase("fsdp bf16", "--bf16", (2, 3)),
    ByteCase("fsdp lamb", "--optimizer lamb", (3,)),
    ByteCase("zero 0", "--stage 0", _FEW),
    ByteCase("zero 1", "--stage 1", _FEW),
    ByteCase("zero 2", "--stage 2", _ALL),
    ByteCase("zero 3", "--stage 3", _ALL),
    ByteCase("zero 1 bf16", "--stage 1 --bf16"),
    ByteCase("zero 2 bf16", "--stage 2 --bf16", (3,)),
    ByteCase("zero 3 bf16", "--stage 3 --bf16", (4,)),
    ByteCase("radius", "--density 0.3 --interval 100", (2, 3, 4)),
    ByteCase("radius dense", "--interval 1"),
    ByteCase("tp_pp tp2", "--tp 2 --pp 1", (2, 4), 4, "tiny"),
    ByteCase("tp_pp pp2", "--tp 1 --pp 2", (2, 4), 4, "tiny"),
    ByteCase("tp_pp tp2 pp2", "--tp 2 --pp 2", (4, 8), 4, "tiny"),
    ByteCase("megatron tp2", "--tp 2 --pp 1 --no-zero1", (2, 4), 4),
    ByteCase("megatron tp2 sequence", "--tp 2 --pp 1 --no-zero1 --sequence-parallel", (2,), 4),
    ByteCase("megatron pp2", "--tp 1 --pp 2 --no-zero1", (2, 4), 4),
    ByteCase("megatron pp4 virtual", "--tp 1 --pp 4 --no-zero1 --virtual-stages 2", (4,), 4),
    ByteCase("megatron dp zero1", "--tp 1 --pp 1", (2, 3, 4), 4),
    ByteCase("megatron pp2 zero1", "--tp 1 --pp 2", (2,), 4),
    ByteCase("megatron tp2 pp2 zero1 bf16", "--tp 2 --pp 2 --bf16", (4, 8), 4),
    ByteCase("megatron tp2 pp2 zero1", "--tp 2 --pp 2", (8,), 4),
)


def compare(plan: Iterable[tuple[ByteCase, int]]) -> list[dict[str, str | int]]:
    """Rows {case, world_size, rank, kind, what, predicted, measured} of cases at world sizes.

    kind is payload or held.
    """
    with tempfile.TemporaryDirectory(prefix="aiscale-bytes-") as folder:

        def rows_of(job: tuple[ByteCase, int]) -> list[dict]:
            case, world_size = job
            return _rows(case, world_size, Path(folder, f"{case.name} {world_size}"))

        # The largest first, so that none runs alone at the end.
        jobs = sorted(plan, key=lambda job: -job[1])
        with ThreadPoolExecutor(2) as pool:
            return [row for rows in pool.map(rows_of, jobs) for row in rows]


def _rows(case: ByteCase, world_size: int, folder: Path) -> list[dict]:
    """Start the ranks; raises RuntimeError if they fail."""
    folder.mkdir()
    words = [*case.words(world_size), "--text", str(_text(folder)), "--save", str(folder / "run")]
    ranks = ["-m", "aiscale.measure.bytes", "--rank", str(folder), case.trainer, *words]
    program = (
        f"from aiscale.launch import launch; raise SystemExit(launch({world_size}, {ranks}, "
        f"preload={_NEEDED}))"
    )
    log = folder / "log"
    with log.open("ab") as file:
        outputs = {"stdout": file.fileno(), "stderr": file.fileno()}
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        job = start_python(["-c", program], env, preload=_NEEDED, **outputs)
        job.join(_TIMEOUT_S)
        if job.exitcode is None:
            job.kill()  # its ranks end with it
    if job.exitcode:
        said = log.read_text(errors="replace")
        raise RuntimeError(f"{case.name} on {world_size} ranks failed:\n{said[-2000:]}")
    rows = []
    for rank in range(world_size):
        head = {"case": case.name, "world_size": world_size, "rank": rank}
        rows += [{**head, **row} for row in json.loads((folder / f"{rank}.json").read_text())]
    return rows


def _text(folder: Path) -> Path:
    """Tokens that fit into every model's vocabulary."""
    text = folder / "text"
    text.mkdir()
    (text / "tokens.bin").write_bytes(bytes(4000))
    about = {"tokens": 2000, "vocab_size": 1, "sha256": "of the byte table"}
    (text / "manifest.json").write_text(json.dumps(about))
    return text


# On a rank --------------------------------------------------------------------------------------


class Step:
    """What this rank sends between two calls of Job.log, and holds at the second."""

    def __init__(self, trainer: str) -> None:
        self.traffic, self.holding = Traffic(), Holding(trainer)
        self.before: dict = {}
        self.sent, self.calls, self.held = Counter(), Counter(), {}

    def watch(self, job: type) -> None:
        """Count from here on; `job` is the trainers' Job."""
        backend = wire.backend_for(self.traffic, Link())
        init, make, log = dist.init_process_group, job.__init__, job.log

        def counted(*args, **kwargs):
            return init(*args, backend=backend, **kwargs)

        def made(its_job, args, optimizer, *rest):
            make(its_job, args, optimizer, *rest)
            self.holding.begin(optimizer)
            for radius in instances("Radius"):
                radius.check_masks = self.apart(radius.check_masks)

        def logged(its_job, *args):
            self.end()
            self.apart(log)(its_job, *args)

        dist.init_process_group, job.__init__, job.log = counted, made, logged

    def apart(self, function: Callable) -> Callable:
        """The function, whose traffic is not the step's."""

        def call(*args):
            with self.traffic.control():
                return function(*args)

        return call

    def end(self) -> None:
        self.sent, self.calls = Counter(), Counter()
        for (op, group), count in self.traffic.groups_since(self.before).items():
            if len(group.ranks) > 1:
                self.sent[op, group.name] += count.payload_bytes
                self.calls[op, group.name] += count.calls
        self.before = self.traffic.groups()
        self.held = self.holding.bytes()


def measure_rank(folder: str, trainer: str, *words: str) -> None:
    """Run the trainer on this rank and write its rows."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    step = Step(trainer)
    sys.argv = [trainer, *words]
    step.watch(importlib.import_module("aiscale.train.job").Job)
    gc.freeze = lambda: None  # it is the last line of a trainer
    runpy.run_module(f"aiscale.train.{trainer}", run_name="__main__", alter_sys=True)
    parser: argparse.ArgumentParser = importlib.import_module("aiscale.train.options").options(
        trainer
    )
    args = parser.parse_args(list(words))
    rows = rows_of(step, trainer, args, world_size, rank)
    Path(folder, f"{rank}.json").write_text(json.dumps(rows))


def rows_of(step: Step, trainer: str, args, world_size: int, rank: int) -> list[dict]:
    """Rows {kind, what, predicted, measured, calls} of this rank's last step."""
    predicted = Counter(beside(trainer, args, world_size, rank))
    if trainer == "tp_pp":
        held = tp_pp_held(args, world_size, rank)
    else:
        run = run_of(trainer, args)
        predicted.update(cost.step_traffic(run, world_size, rank))
        held = cost.held_bytes(run, world_size, rank)
    rows = []
    for op, group in sorted({*step.sent, *predicted}):
        key = (op, group)
        row = {"kind": "payload", "what": f"{op} {group}", "predicted": predicted[key]}
        rows.append({**row, "measured": step.sent[key], "calls": step.calls[key]})
    for what in sorted({*held, *step.held}):
        row = {"kind": "held", "what": what, "predicted": held.get(what, 0)}
        rows.append({**row, "measured": step.held.get(what, 0), "calls": 0})
    return rows


def main(names: list[str]) -> int:
    """Print the rows of these cases, or of all."""
    cases = [case for case in BYTE_CASES if not names or case.name in names]
    rows = compare((case, n) for case in cases for n in case.worlds)
    for row in rows:
        differs = row["predicted"] != row["measured"]
        if row["rank"] == 0 or differs:
            where = f"{row['case']:30} rank {row['rank']} of {row['world_size']}"
            what = f"{row['kind']} {row['what']:24}"
            numbers = f"{row['predicted']:9,} predicted {row['measured']:9,} measured"
            print(f"{where}  {what} {numbers}", "DIFFERS" * differs)
    wrong = sum(row["predicted"] != row["measured"] for row in rows)
    print(f"{len(rows)} rows of all ranks, {wrong} differ")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        measure_rank(*sys.argv[2:])
    else:
        raise SystemExit(main(sys.argv[1:]))
