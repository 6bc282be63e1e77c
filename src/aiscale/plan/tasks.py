"""Six tasks for the planner's page: each is won by a plan that meets its rules.

    task = TASKS["lost-node"]
    task.judge(plan)      # [(rule, whether the plan meets it, what the plan has), ...]

`plan` is what `aiscale plan --json` prints, so the same formulas that draw the page decide. A task
fixes model, machine and tokens, and leaves some of the page's controls to the reader. Where the
layout is theirs, the page does not search.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field


class Rule(ABC):
    """One condition on a plan."""

    @abstractmethod
    def says(self) -> str:
        """The rule in words."""

    @abstractmethod
    def holds(self, plan: dict) -> bool: ...

    @abstractmethod
    def shows(self, plan: dict) -> str:
        """What the plan has."""


@dataclass(frozen=True)
class AtMost(Rule):
    key: str  #: of the plan
    limit: float
    unit: str

    def says(self) -> str:
        return f"at most {self.limit:,g} {self.unit}"

    def holds(self, plan: dict) -> bool:
        return plan[self.key] <= self.limit

    def shows(self, plan: dict) -> str:
        return f"{_three_digits(plan[self.key])} {self.unit}"


@dataclass(frozen=True)
class AtLeast(AtMost):
    def says(self) -> str:
        return f"at least {self.limit:,g} {self.unit}"

    def holds(self, plan: dict) -> bool:
        return plan[self.key] >= self.limit


class Fits(Rule):
    def says(self) -> str:
        return "the memory is enough"

    def holds(self, plan: dict) -> bool:
        return plan["fits"]

    def shows(self, plan: dict) -> str:
        return f"{plan['memory_GB']:.0f} of {plan['capacity_GB']:.0f} GB"


class FitsSafely(Rule):
    def says(self) -> str:
        return "the memory is enough at the upper end of its range, too"

    def holds(self, plan: dict) -> bool:
        return plan["memory_GB_band"][1] <= plan["capacity_GB"]

    def shows(self, plan: dict) -> str:
        return f"up to {plan['memory_GB_band'][1]:.0f} of {plan['capacity_GB']:.0f} GB"


class NothingIsLost(Rule):
    """Ranks are numbered as Megatron does: tensor-parallel peers first, then data-parallel ones."""

    def says(self) -> str:
        return "another node has every weight and optimizer state of the lost one"

    def holds(self, plan: dict) -> bool:
        return self.shows(plan) == "yes"

    def shows(self, plan: dict) -> str:
        layout = dict(part.split("=") for part in plan["option"].split(","))
        copies, tp = int(layout["dp"]), int(layout["tp"])
        if layout.get("fsdp") == "True" or layout.get("zero_stage", "0") != "0":
            return "no: data-parallel ranks share one copy of the states"
        if copies == 1:
            return "no: dp is 1, there is one copy"
        if copies * tp * plan["nodes"] <= plan["gpus"]:
            return "no: all copies of a stage are in one node"
        return "yes"


@dataclass(frozen=True, kw_only=True)
class Task:
    title: str
    goal: str
    hint: str
    learned: str  #: shown to who has won
    free: tuple[str, ...]  #: the reader's controls: layout, nodes, batch
    model: str
    machine: str
    nodes: int
    batch: int
    tokens: float
    seq: int | None = None  #: None: the model's
    rules: tuple[Rule, ...] = field(default=())

    def judge(self, plan: dict) -> list[tuple[str, bool, str]]:
        return [(rule.says(), rule.holds(plan), rule.shows(plan)) for rule in self.rules]

    def to_dict(self) -> dict:
        names = ("title", "goal", "hint", "learned", "free", "model", "machine", "nodes", "batch")
        about = {name: getattr(self, name) for name in (*names, "tokens", "seq")}
        return about | {"rules": [rule.says() for rule in self.rules]}


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


TASKS = {
    "fit": Task(
        title="Make it fit",
        goal="Llama 70B on four nodes of eight H100. Choose a layout that fits and computes well.",
        hint="Weights, gradients and Adam's states take about 18 bytes a parameter: 40 GB a device "
        "if tp x pp is 32. Keep tp inside a node of eight, and let pp cross nodes.",
        learned="On few devices tensor and pipeline parallelism divide the states and the layers' "
        "activations, too; ZeRO-3 divides the states alone.",
        free=("layout",),
        model="llama-70b",
        machine="dgx-h100",
        nodes=4,
        batch=256,
        tokens=1e11,
        rules=(Fits(), AtLeast("mfu_pct", 40, "% MFU")),
    ),
    "headroom": Task(
        title="Leave room",
        goal="FORGE-M, 13B, on eight nodes of Perlmutter with 40 GB a device. The memory's range "
        "says where 8 of 10 published runs ended: stay below the limit at its upper end.",
        hint="Divide the states first (ZeRO-1 with tp and pp, or FSDP). Then a larger micro-batch "
        "computes faster, and selective recomputation pays for its memory.",
        learned="The fastest layout that fits by a gigabyte may not run. A few percent of speed "
        "buy a safe margin.",
        free=("layout",),
        model="forge-m",
        machine="perlmutter",
        nodes=8,
        batch=512,
        tokens=2.6e11,
        rules=(FitsSafely(), AtLeast("mfu_pct", 48, "% MFU")),
    ),
    "experts": Task(
        title="Experts",
        goal="Mixtral has eight experts a layer, and a token meets two: 47B parameters, 13B of "
        "them active. Train it on two nodes of eight H100. MFU counts the active ones.",
        hint="Most parameters are experts', and expert parallelism divides these without cutting a "
        "product into thinner ones. Its ranks are those of dp x tp. A pipeline and a little "
        "tp divide the rest.",
        learned="Each expert is held for every token, and computes for a quarter of them. Expert "
        "parallelism divides that memory, at the price of an all-to-all, best inside a node.",
        free=("layout",),
        model="mixtral-8x7b",
        machine="dgx-h100",
        nodes=2,
        batch=256,
        seq=4096,
        tokens=1e11,
        rules=(Fits(), AtLeast("mfu_pct", 33, "% MFU")),
    ),
    "budget": Task(
        title="In a week, for the money",
        goal="A GPT of 22B learns 440 billion tokens on Perlmutter. The batch may have 1,024 "
        "sequences. The planner finds the layout; you choose nodes and batch.",
        hint="More nodes cost node-hours because each has less to compute between two exchanges. "
        "A larger batch gives each more.",
        learned="Speed is bought with node-hours, and a small batch makes it dear.",
        free=("nodes", "batch"),
        model="22b",
        machine="perlmutter",
        nodes=16,
        batch=256,
        tokens=4.4e11,
        rules=(
            Fits(),
            AtMost("days", 7, "days"),
            AtMost("node_hours", 35_000, "node-hours"),
            AtMost("batch", 1024, "sequences a step"),
        ),
    ),
    "month": Task(
        title="A month of Frontier",
        goal="A GPT of 175B learns 80 billion tokens on 64 nodes of Frontier.",
        hint="With tp 4 a stage's messages cross few links. Divide the optimizer states (ZeRO-1), "
        "then raise pp until it fits without recomputation. What does the micro-batch do to "
        "the bubble?",
        learned="The rest of the month depends on the bubble: enough micro-batches, and no more "
        "stages than the memory asks for.",
        free=("layout",),
        model="gpt3-175b",
        machine="frontier",
        nodes=64,
        batch=1024,
        tokens=8e10,
        rules=(Fits(), AtMost("days", 30, "days")),
    ),
    "lost-node": Task(
        title="A node is lost each day",
        goal="A GPT of 22B on four nodes of eight A100. A node is lost each day, with all that it "
        "holds, and you do not want to read a checkpoint: the others must have it all. Find a "
        "layout that is cheap.",
        hint="Who else holds rank 0's optimizer states? Ranks are numbered along tp first, then "
        "along dp: tp x dp devices in a row hold one stage, and these must be more than a "
        "node. Then a larger micro-batch makes it cheaper.",
        learned="ZeRO and FSDP save memory by keeping one copy. Whole copies on several nodes cost "
        "memory, and save the checkpoint's way.",
        free=("layout",),
        model="22b",
        machine="dgx-a100",
        nodes=4,
        batch=256,
        tokens=1e11,
        rules=(Fits(), NothingIsLost(), AtMost("node_hours", 3300, "node-hours")),
    ),
}
