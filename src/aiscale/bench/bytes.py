"""Bytes predicted and measured, side by side, for every strategy: `aiscale bench bytes`.

For each case (a strategy with its options) and world size, ranks are started, three steps of a tiny model are trained,
and of the third each rank compares what it sent, by collective and process group, and what it holds, by category, with
`cost.step_traffic` and `cost.held_bytes`. Both must agree to the byte.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from aiscale.bench.timing import machine_facts

CATEGORIES = ("parameters", "gradients", "optimizer states")

#: 67 tokens and 3 heads' worth of odd sizes would divide by nothing: what libraries pad is seen.
_MODEL = ("model.n_layer=4", "model.n_head=4", "model.d_model=32", "model.vocab_size=67", "model.max_seq_len=16")
_LOOP = ("loop.seq_len=16", "loop.micro_batch=1", "loop.device=cpu")


@dataclass(frozen=True)
class Case:
    """A strategy with its options, and the world sizes at which it is measured."""

    name: str
    settings: tuple[str, ...]
    worlds: tuple[int, ...]
    micro_batches: int = 2  #: of each data-parallel rank in a step
    apart: bool = False  #: in processes of its own, because the library changes the process it runs in

    def run(self, world_size: int):
        """The Run of this case."""
        from aiscale.config import Run

        run = Run().override(*_MODEL, *_LOOP, *self.settings)
        dp = run.parallel.data_parallel(world_size)
        return run.override(f"loop.global_batch={dp * self.micro_batches}")


_ALL = (2, 3, 4, 5, 6, 7, 8)
CASES = (
    Case("ddp", ("parallel.strategy=ddp",), _ALL),
    Case("ddp bf16", ("parallel.strategy=ddp", "parallel.compress=bf16"), (2, 4)),
)


def bench_bytes(*, quick: bool = False, report: Callable[[str], None] = lambda message: None) -> dict:
    """Every case at every world size (quick: 2 ranks, or the smallest that a case needs); see `compare`."""
    rows = []
    for world_size in _ALL:
        chosen = [case for case in CASES if world_size == min(case.worlds) or (not quick and world_size in case.worlds)]
        if chosen:
            report(f"{world_size} ranks: {', '.join(case.name for case in chosen)}")
            rows += compare([case.name for case in chosen], world_size)
    wrong = sum(row["predicted"] != row["measured"] for row in rows)
    check = {"name": "rows that differ", "value": wrong, "target": 0, "at_most": True, "met": wrong == 0}
    return {"rows": rows, "checks": [check], "machine": machine_facts()}


def compare(names: Iterable[str], world_size: int) -> list[dict]:
    """Rows {case, world_size, rank, kind (payload or held), what, predicted, measured} of the named cases."""
    from aiscale.bench.ddp import BenchError
    from aiscale.dist import launch

    cases = [case for case in CASES if case.name in names]
    rounds = [[case] for case in cases if case.apart]
    rounds += [together] if (together := [case for case in cases if not case.apart]) else []
    rows = []
    with tempfile.TemporaryDirectory(prefix="aiscale-bench-") as folder:
        for number, group in enumerate(rounds):
            out = Path(folder) / f"{number}.json"
            status = launch(world_size, ["-m", "aiscale.bench.bytes", str(out), *(case.name for case in group)])
            if status:
                raise BenchError(
                    f"{world_size} ranks of {', '.join(case.name for case in group)} ended with status {status}; "
                    "what went wrong stands above"
                )
            rows += json.loads(out.read_text())
    return rows


def show_bytes(result: dict) -> None:
    """Print what bench_bytes returned: rank 0's rows, and of the others those that differ from their prediction."""
    print(f"{'case':22} {'ranks':>5}  {'rank':>4}  {'what':38} {'predicted':>12} {'measured':>12}")
    for row in result["rows"]:
        equal = row["predicted"] == row["measured"]
        if row["rank"] == 0 or not equal:
            print(
                f"{row['case']:22} {row['world_size']:5}  {row['rank']:4}  {row['kind'] + ' ' + row['what']:38} "
                f"{row['predicted']:12,} {row['measured']:12,}{'' if equal else '  differ'}"
            )
    (check,) = result["checks"]
    print(f"{len(result['rows'])} rows of all ranks, {check['value']} differ")


def _rank(out: Path, names: list[str]) -> None:
    """What each rank does."""
    import torch

    from aiscale.dist import connect

    torch.set_num_threads(1)
    world = connect("cpu")
    rows = [row for name in names for row in _rows(next(c for c in CASES if c.name == name), world)]
    everyone = world.gather(rows)
    if world.is_main:
        out.write_text(json.dumps([row for rank_rows in everyone for row in rank_rows]))
    world.close()


def _rows(case: Case, world) -> list[dict]:
    from aiscale import cost

    run = case.run(world.size)
    sent, held = _measure(run, world, case.micro_batches)
    sent_predicted = cost.step_traffic(run, world.size, world.rank)
    held_predicted = cost.held_bytes(run, world.size, world.rank)
    head = {"case": case.name, "world_size": world.size, "rank": world.rank}
    rows = [
        {
            **head,
            "kind": "payload",
            "what": f"{op} {group}",
            "predicted": sent_predicted.get((op, group), 0),
            "measured": sent.get((op, group), 0),
        }
        for op, group in sorted({*sent, *sent_predicted})
    ]
    rows += [
        {**head, "kind": "held", "what": what, "predicted": held_predicted[what], "measured": held[what]}
        for what in CATEGORIES
    ]
    return rows


def _measure(run, world, micro_batches: int) -> tuple[dict, dict]:
    """(payload bytes by (collective, group) of the third step, bytes held after it by category)."""
    import torch

    from aiscale.meter import held_bytes
    from aiscale.parallel import build

    engine = build(run, world)
    torch.manual_seed(engine.data_rank)
    tokens = torch.randint(0, run.model.vocab_size, (micro_batches, 1, run.loop.seq_len + 1))
    batch = [(window[:, :-1], window[:, 1:]) for window in tokens]
    for _ in range(3):  # the first steps set up: DDP rebuilds its buckets, AdamW makes its states
        before = world.traffic.groups()
        engine.step(batch, 1e-3)
    sent: dict[tuple[str, str], int] = {}
    for (op, group), count in world.traffic.groups_since(before).items():
        if len(group.ranks) > 1:
            sent[op, group.name] = sent.get((op, group.name), 0) + count.payload_bytes
    held = held_bytes(engine.held())
    engine.close()
    return sent, held


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _rank(Path(sys.argv[1]), sys.argv[2:])
