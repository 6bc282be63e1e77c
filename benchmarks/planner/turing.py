"""Figure 2 and table 5 of the Turing report by `aiscale plan`, misses included.

    python benchmarks/planner/turing.py            # the tables
    python benchmarks/planner/turing.py --store    # into the file that appendix A3 shows

Predicted: a step of gpt2 and gpt2-medium (blocks of 128 characters, 67 different, one accelerator)
in 16 and 32 bits, at batches of 64 and 128. Published: Technical Report 3 of the Alan Turing
Institute, section 6 (doi:10.5281/zenodo.13349541). Only ratios are compared, since the text has no
seconds. No constant was fitted to them.

The second question is its "gpt2-medium with a batch of 128 does not fit 40 GB". The planner knows a
GELU of one operation. minGPT writes it out in eight, and under autocast `pow` and what follows work
in fp32. What the eight keep for the backward pass is counted here on a small tensor, with the types
that autocast would give it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from aiscale.plan import published
from aiscale.plan.answer import plan
from aiscale.plan.hardware import platform_of
from aiscale.plan.layout import Layout, Software, shape_named
from aiscale.plan.machines import find_machine

STORED = Path(published.__file__).parent / "measured" / "turing_figure_2.json"
MACHINES = {
    "A100": "baskerville",
    "V100": "jade2",
    "H100": "stanage-h100",
    "MI100": "cosma8-mi100",
    "MI210": "cosma8-mi210",
}
AMD = ("MI100", "MI210")
MODELS = ("gpt2", "gpt2-medium")  #: of figure 2
BATCHES = (64, 128)
#: minGPT has the score matrix in memory
MINGPT = Software(flash=False)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training on one accelerator."""

    machine: str
    model: str = "gpt2"
    batch: int = 64
    precision: str = "fp16"

    def seconds_a_sequence(self) -> float:
        return self.answer().step.total_s / self.batch

    def answer(self):
        layout = Layout(
            micro_batch=self.batch,
            global_batch=self.batch,
            precision=self.precision,
            software=MINGPT,
        )
        platform = platform_of(find_machine(MACHINES[self.machine]))
        return plan(shape_named(f"turing-{self.model}"), layout, platform)


def pairs_of(name: str) -> list[tuple[Case, Case]]:
    """The trainings whose seconds a ratio divides."""
    both = list(itertools.product(MODELS, BATCHES))
    if name == "V100 over A100":
        return [(Case(machine="V100", batch=b), Case(machine="A100", batch=b)) for b in BATCHES]
    if name == "MI100 and MI210 over A100":
        return [
            (Case(machine=amd, batch=b), Case(machine="A100", batch=b))
            for amd, b in itertools.product(AMD, BATCHES)
        ]
    if name == "A100 over H100, bf16":
        cases = [{"model": m, "batch": b, "precision": "bf16"} for m, b in both]
        return [(Case(machine="A100", **case), Case(machine="H100", **case)) for case in cases]
    if name == "gpt2-medium over gpt2":
        return [
            (Case(machine=at, model="gpt2-medium", batch=b), Case(machine=at, batch=b))
            for at, b in itertools.product(("A100", "V100", *AMD), BATCHES)
        ]
    machines = ("A100",) if "A100" in name else AMD
    if name.startswith("batch 128 over 64"):
        return [
            (Case(machine=at, model=m, batch=128), Case(machine=at, model=m, batch=64))
            for at, m in itertools.product(machines, MODELS)
        ]
    # "16 bits over 32 bits, MODEL, MACHINES": the report let products run in tf32 where there is it
    model, wide = name.split(", ")[1], "tf32" if "A100" in name else "fp32"
    return [
        (
            Case(machine=at, model=model, batch=b),
            Case(machine=at, model=model, batch=b, precision=wide),
        )
        for at, b in itertools.product(machines, BATCHES)
    ]


def published_ranges() -> dict[str, tuple[float, float]]:
    """{ratio of times: the report's range}, from the facts that the package holds."""
    rows = published.facts("turing_facts")["facts"]
    facts = {row["what"]: row for row in rows if row["fig"] == "2"}

    def shorter(what: str) -> tuple[float, float]:
        """A time that is 8 to 15 % shorter: 0.85 to 0.92 of the other."""
        low, high = facts[what]["pct"]
        return 1 - high / 100, 1 - low / 100

    def times(what: str) -> tuple[float, float]:
        low, high = facts[what]["ratio"]
        return low, high

    return {
        "V100 over A100": times("A100 over V100, gpt2 fp16"),
        "A100 over H100, bf16": times("H100 over A100, bf16"),
        "MI100 and MI210 over A100": times("A100 over MI100/MI210, gpt2 fp16"),
        "gpt2-medium over gpt2": times("gpt2 -> gpt2-medium epoch time"),
        "batch 128 over 64, A100": shorter("batch 64->128 gain A100"),
        "batch 128 over 64, AMD": shorter("batch 64->128 gain MI100/MI210"),
        "16 bits over 32 bits, gpt2, A100": shorter("gpt2: 16-bit vs fp32 time difference A100"),
        "16 bits over 32 bits, gpt2-medium, A100": shorter("gpt2-medium A100"),
        "16 bits over 32 bits, gpt2, AMD": shorter("same MI100/MI210"),
        "16 bits over 32 bits, gpt2-medium, AMD": shorter("gpt2-medium MI100/MI210"),
    }


def rows() -> list[dict]:
    """Each ratio: published and predicted ranges, and by how much the middle is outside."""
    found = []
    for name, (low, high) in published_ranges().items():
        ratios = [
            above.seconds_a_sequence() / below.seconds_a_sequence()
            for above, below in pairs_of(name)
        ]
        middle = (min(ratios) * max(ratios)) ** 0.5
        nearest = min(max(middle, low), high)
        row = {"ratio": name, "published": [round(low, 3), round(high, 3)]}
        row["predicted"] = [round(min(ratios), 3), round(max(ratios), 3)]
        row["outside_pct"] = round(100 * (middle / nearest - 1), 1)
        found.append(row)
    return found


def gelu_of_one_operation(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def gelu_written_out(x: torch.Tensor) -> torch.Tensor:
    """The same formula in PyTorch's operations; autocast computes a power in fp32."""
    cube = torch.pow(x.float(), 3.0)
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * cube)
    return 0.5 * x * (1.0 + torch.tanh(inner))


def kept_bytes(operation, entries: int = 1024) -> float:
    """Bytes an entry that an operation and the product behind it keep for the backward pass."""
    kept = []  # the tensors themselves, so that no address is used twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(entries, dtype=torch.float16, requires_grad=True)
    weight = torch.ones(entries, dtype=torch.float16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # the next layer's product takes 16 bits, and keeps its input for the weight's gradient
        torch.mul(operation(x).half(), weight)
    storages = [tensor.untyped_storage() for tensor in kept if tensor is not weight]
    nbytes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(nbytes.values()) / entries


def memory() -> dict:
    """gpt2-medium at batch 128 on 40 GB: the planner's bytes, and those of a GELU written out."""
    answer = Case(machine="A100", model="gpt2-medium", batch=128).answer()
    shape = answer.shape
    entries = 128 * shape.seq * shape.width * shape.layers  # results of all layers' first MLP part
    one, eight = kept_bytes(gelu_of_one_operation), kept_bytes(gelu_written_out)
    more_gb = (eight - one) * entries / 1e9
    return {
        "model": "gpt2-medium",
        "batch": 128,
        "capacity_gb": round(answer.capacity_gb, 1),
        "planned_gb": round(answer.memory_gb, 1),
        "gelu_bytes_an_entry": {"one operation": one, "written out": eight},
        "more_gb": round(more_gb, 1),
        "with_it_gb": round(answer.memory_gb + more_gb, 1),
    }


def table_5() -> list[dict]:
    """Peak memory of one sequence under DDP on one A100, in MiB; only shapes that are known."""
    found = []
    for row in published.table("turing_table5_peak_memory"):
        if row["n_layer"]:
            planned = Case(machine="A100", model=row["model"], batch=1).answer().memory_gb
            planned_mib = planned * 1e9 / 2**20
            off_pct = round(100 * (planned_mib / row["peak_memory_MiB"] - 1), 1)
            sizes = {"published_mib": row["peak_memory_MiB"], "planned_mib": round(planned_mib, 1)}
            found.append({"model": row["model"], **sizes, "off_pct": off_pct})
    return found


def lines(found: list[dict], memories: list[dict]) -> list[str]:
    """For the scoreboard."""
    missed = [row for row in found if row["outside_pct"]]
    names = "; ".join(f"{row['ratio']} by {row['outside_pct']:+.0f} %" for row in missed)
    return [
        f"Figure 2 of the Turing report, ratios of times on one accelerator: the middle of "
        f"{len(found) - len(missed)} of {len(found)} predictions is inside the published range.",
        f"Outside: {names}.",
        "Table 5, peak memory: "
        + ", ".join(f"{row['model']} {row['off_pct']:+.0f} %" for row in memories)
        + ".",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", action="store_true", help=f"write {STORED.name}")
    args = parser.parse_args()
    found = rows()
    for row in found:
        published_range, predicted = ("{} to {}".format(*row[key]) for key in row if "p" == key[0])
        print(f"{row['ratio']:42} published {published_range:16} predicted {predicted:16}", end="")
        print(f"{row['outside_pct']:+6.1f} %" if row["outside_pct"] else "  inside")
    needed, memories = memory(), table_5()
    print(*lines(found, memories), needed, sep="\n")
    if args.store:
        about = {"note": "Predicted by benchmarks/planner/turing.py --store; nothing is measured."}
        text = json.dumps(
            about
            | {"rows": found, "table_5": memories, "memory": needed}
            | {"lines": lines(found, memories)},
            indent=1,
        )
        STORED.write_text(text + "\n")


if __name__ == "__main__":
    main()
