"""Jobs that survive the death of a rank, as Bamboo, Oobleck and Varuna do, beside a plain restart.

    from aiscale.landscape import elastic
    calm, hit = elastic.run([elastic.Scenario("bamboo"), elastic.Scenario("bamboo", kill=(2, 3, 5))])
    elastic.difference(hit, calm)                        # 0.0: the same losses and weights, bit by bit
    hit.detect_s, hit.recover_s, hit.steps_repeated, hit.events

A GPT in fp64 trains on ranks of this machine. `kill` = (rank, step, place): there the rank sends itself SIGKILL, before
one of its passes, before it shares gradients, or before or after the commit. The survivors see a broken connection and
meet again at the store of the process that started them. No rank is started again, but for "restart" all are.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from aiscale.config import ModelConfig
from aiscale.landscape.plans import Plan, first_plan, next_plan
from aiscale.launch import start_ranks

_NEEDED = ["torch._dynamo", "aiscale.landscape.elastic_rank"]  #: modules, for ranks


@dataclass(frozen=True)
class Scenario:
    """A job. `fault` plants one: reduction (the copies of a layer do not add up their gradients), moments (a state that
    another rank or a file gives comes without Adam's moments)."""

    idea: str  #: bamboo, oobleck, varuna or restart
    kill: tuple[int, int, int] | None = None  #: (rank, step, place in the step), from 0
    ranks: int = 4
    steps: int = 6
    micro_batches: int = 6  #: of the global batch
    checkpoint_every: int = 2  #: steps; Varuna and restart
    fault: str = ""
    model: ModelConfig = ModelConfig(n_layer=6, n_head=2, d_model=32, vocab_size=64, max_seq_len=16, tied=False)

    def __post_init__(self) -> None:
        if self.idea not in ("bamboo", "oobleck", "varuna", "restart"):
            raise ValueError(f"idea is {self.idea!r}: it must be bamboo, oobleck, varuna or restart")
        if self.kill and not (self.kill[0] < self.ranks and self.kill[1] < self.steps and self.kill[2] < self.places()):
            ends = (self.ranks - 1, self.steps - 1, self.places() - 1)
            raise ValueError(f"kill is {self.kill}, but (rank, step, place) ends at {ends}")

    def plans(self) -> tuple[Plan, Plan]:
        """The plan at the start, and the one after the kill."""
        sizes = {"layers": self.model.n_layer, "micro_batches": self.micro_batches}
        first = first_plan(self.idea, ranks=self.ranks, **sizes)
        if self.kill is None or self.idea == "restart":
            return first, first
        return first, next_plan(self.idea, first, [r for r in range(self.ranks) if r != self.kill[0]], **sizes)

    def places(self) -> int:
        """In how many places of a step the rank of `kill` may die."""
        plan = first_plan(self.idea, ranks=self.ranks, layers=self.model.n_layer, micro_batches=self.micro_batches)
        return 3 + sum(plan.pipelines[p][s].rank == self.kill[0] for p, _, _, s in plan.work())


@dataclass
class Outcome:
    scenario: Scenario
    losses: list[float]  #: of each step
    weights: dict[str, Tensor] = field(repr=False)  #: of the whole model
    copies_differ: float  #: the largest difference between two ranks' copies of a weight
    events: list[dict] = field(repr=False)  #: {rank, event, step, at_s}: begin, done, killed or detected
    detect_s: float  #: from the kill until the last survivor has seen it; 0 without a kill
    recover_s: float  #: from the kill until the last rank is done with the step in which it fell
    steps_repeated: int  #: that a rank began again from their start


def run(scenarios: Iterable[Scenario], *, timeout_s: float = 300) -> list[Outcome]:
    """Run jobs one after another. No process is left, however it ends; raises RuntimeError if a survivor fails."""
    with tempfile.TemporaryDirectory() as base:
        return [_run(each, Path(base) / str(i), timeout_s) for i, each in enumerate(scenarios)]


def _run(scenario: Scenario, folder: Path, timeout_s: float) -> Outcome:
    folder.mkdir()
    (folder / "spec.json").write_text(json.dumps(dataclasses.asdict(scenario)))
    codes = _ranks(scenario, folder, timeout_s, preload=_NEEDED)
    killed = (folder / "killed").exists()
    if scenario.idea == "restart" and killed:
        # As on new nodes, Python starts and imports on every rank.
        codes, killed = _ranks(scenario, folder, timeout_s), False
    if any(code != 0 and not (killed and rank == scenario.kill[0]) for rank, code in enumerate(codes)):
        raise RuntimeError(f"{scenario} failed: {(folder / 'log').read_text()[-2000:]}")
    events = [json.loads(line) for file in folder.glob("events-*") for line in file.read_text().splitlines()]
    events.sort(key=lambda event: event["at_s"])
    events = [{**event, "at_s": event["at_s"] - events[0]["at_s"]} for event in events]
    ends = [torch.load(file) for file in sorted(folder.glob("end-*.pt"))]
    weights = {name: tensor for end in ends for name, tensor in end["weights"].items()}
    differ = max((weights[name] - w).abs().max().item() for end in ends for name, w in end["weights"].items())
    begun = Counter((e["rank"], e["step"]) for e in events if e["event"] == "begin")
    repeated = len({step for (_, step), times in begun.items() if times > 1})
    return Outcome(scenario, ends[0]["losses"], weights, differ, events, *_seconds(events), repeated)


def _ranks(scenario: Scenario, folder: Path, timeout_s: float, preload: Sequence[str] = ()) -> list[int | None]:
    """Start the ranks of one job and wait for them; returns their exit statuses, None of one that has not ended."""
    argv, deadline = ["-m", "aiscale.landscape.elastic_rank", str(folder)], time.monotonic() + timeout_s
    with (folder / "log").open("ab") as log:
        how = {"env": {"OMP_NUM_THREADS": "1"}, "preload": preload, "stderr": log.fileno()}
        with start_ranks(scenario.ranks, argv, **how) as ranks:
            for rank in ranks:
                rank.join(max(0.0, deadline - time.monotonic()))
            return [rank.exitcode for rank in ranks]


def _seconds(events: list[dict]) -> tuple[float, float]:
    """(detect_s, recover_s)."""
    for killed in (each for each in events if each["event"] == "killed"):
        seen_s = max(e["at_s"] for e in events if e["event"] == "detected")
        done_s = max(e["at_s"] for e in events if e["event"] == "done" and e["step"] == killed["step"])
        return seen_s - killed["at_s"], max(0.0, done_s - killed["at_s"])
    return 0.0, 0.0


def difference(found: Outcome, expected: Outcome) -> float:
    """The largest difference between two jobs, of a step's loss or of a weight."""
    losses = [abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True)]
    return max(losses + [(found.weights[name] - w).abs().max().item() for name, w in expected.weights.items()])
