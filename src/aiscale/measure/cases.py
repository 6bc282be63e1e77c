"""The cases of `aiscale verify`: each is one way to train a small model.

It names the run that it must equal.

The settings make mistakes visible. AdamW divides a gradient by its own size, so a gradient that is
twice too large trains the same weights if all steps have it. So the gradient's norm is compared as
well; the clipping norm lies above the norm in some steps and below it in others; the rate differs
in every step, and the decay is strong. ZeRO and Megatron-Core have cases in fp32, because these
libraries compute a part of each step in it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

STEPS = 12
BATCH = 12  #: sequences; 1, 2, 3 and 4 ranks divide it
#: DeepSpeed's sizes for tiny models: with its own it shards none of their tensors.
TINY_DEEPSPEED = Path(__file__).with_name("deepspeed_tiny.json")
TOKENS = 67  #: different ones in the text: the vocabulary of the preset `odd`

#: The definition of Radius, in one process: no trainer, but what its trainer must equal.
SIMULATED = "radius_simulated"
_COMMON = f"""
--steps {STEPS} --save-every {STEPS} --held-out 0.1
--batch {BATCH} --length 32 --seed 1
--lr 0.01 --warm-up 4 --min-lr 0.001 --weight-decay 0.3 --clip 1.2
"""


@dataclass(frozen=True)
class Case:
    """One way to train a model."""

    name: str
    trainer: str = "serial"
    ranks: int = 1
    options: str = ""  #: of this trainer alone
    micro_batch: int = 0  #: sequences; 0: a rank's whole share of the batch
    model: str = "odd"
    optimizer: str = "adamw"
    precision: str = "fp64"
    launcher: str = ""  #: torchrun or mpiexec; empty: aiscale's own
    compared_with: str = ""  #: the case that it must equal; empty: the serial one
    source: str = ""  #: a folder from which to import aiscale; empty: where this module is

    @property
    def reference(self) -> str:
        """The name of the case that this one must equal."""
        return self.compared_with or serial(self.model, self.optimizer, self.precision).name

    @property
    def module(self) -> str:
        wing = "measure" if self.trainer == SIMULATED else "train"
        return f"aiscale.{wing}.{self.trainer}"

    @property
    def evaluates(self) -> bool:
        return self.trainer != "tp_pp"  # as in its lesson, it has no evaluation

    @property
    def has_norm(self) -> bool:
        return "--stage 0" not in self.options  # there DeepSpeed does not tell it

    def arguments(self, folder: Path) -> list[str]:
        """The options of this case's trainer; `folder` has the text and gets the results."""
        words = [*_COMMON.split(), *self.options.split()]
        words += ["--model", self.model, "--optimizer", self.optimizer]
        words += ["--micro-batch", str(self.micro_batch or BATCH // self.ranks)]
        words += ["--fp64"] if self.precision == "fp64" else []
        words += ["--evaluate-every", str(STEPS // 2)] if self.evaluates else []
        words += ["--config", str(TINY_DEEPSPEED)] if self.trainer == "zero" else []
        return [*words, "--text", str(folder / "text"), "--save", str(folder / self.name)]

    def command(self, folder: Path) -> list[str]:
        """The words after `python` that start this case's job."""
        module = ["-m", self.module, *self.arguments(folder)]
        if self.launcher == "torchrun":
            ranks = ["--nproc-per-node", str(self.ranks)]
            local = ["--standalone", "--local-addr=127.0.0.1"]
            return ["-m", "torch.distributed.run", *local, *ranks, *module]
        if self.ranks == 1 or self.launcher == "mpiexec":
            return module
        words = ["train", self.trainer, "--nproc", str(self.ranks), *self.arguments(folder)]
        return ["-m", "aiscale", *words]

    def referee(self) -> str:
        """The command by which the referee looks for the place where the trainer parts."""
        words = self.options.split()
        for number, word in enumerate(words):
            if word in ("--tp", "--pp", "--ep"):  # the reference is one rank
                words[number + 1] = f"'{{min({words[number + 1]},N)}}'"
        words += ["--micro-batch", "1", "--save", "'{TMP}/run'"]
        start = f"aiscale verify -m {self.module} --nproc {self.ranks}"
        return f"{start} -- {' '.join(words)}"


def serial(model: str, optimizer: str, precision: str) -> Case:
    parts = ["serial", model, *([optimizer] if optimizer != "adamw" else []), precision]
    return Case("-".join(parts), model=model, optimizer=optimizer, precision=precision)


def find_mpiexec() -> str:
    """The mpiexec beside this Python (the mpich wheel's), else the one on PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else "mpiexec"


def text() -> bytes:
    """What the cases learn from, the same everywhere: a table of ours, as TOKENS numbers."""
    table = resources.files("aiscale.plan.published") / "papers/radius_downstream.csv"
    return bytes(byte % TOKENS for byte in table.read_bytes())


_SPARSE = "--density 0.3 --interval 4"
_GRID = "--tp 2 --pp 2"
#: All experts compute each token. With fewer of them rounding decides where two are almost equal,
#: and from there on runs part.
_MIXTURE = "--experts 4 --top-k 4 --pp 1"
#: Our own model has no experts: the reference is one rank of Megatron-Core.
_EQUAL_TO_MIXTURE = {"precision": "fp32", "compared_with": "megatron-mixture"}
_ALL = (
    serial("odd", "adamw", "fp64"),
    serial("odd", "adamw", "fp32"),
    serial("odd", "lamb", "fp64"),
    serial("tiny", "adamw", "fp64"),
    serial("gptj-tiny", "adamw", "fp64"),
    serial("gptj-tiny", "adamw", "fp32"),
    Case("serial-accumulated", micro_batch=3),
    Case("serial-accumulated-fp32", micro_batch=3, precision="fp32"),
    Case("ddp-x2", "ddp", 2),
    Case("ddp-x2-accumulated", "ddp", 2, micro_batch=3),
    Case("ddp-x3-torchrun", "ddp", 3, launcher="torchrun"),
    Case("ddp-x3-mpiexec", "ddp", 3, launcher="mpiexec"),
    Case("ddp-x4", "ddp", 4, "--bucket-mb 0.05"),
    Case("ddp-x2-fp32", "ddp", 2, precision="fp32"),
    Case("ddp-x2-lamb", "ddp", 2, optimizer="lamb"),
    Case("ddp-x2-gptj", "ddp", 2, model="gptj-tiny"),
    Case("fsdp-x2", "fsdp", 2),
    Case("fsdp-x2-accumulated", "fsdp", 2, micro_batch=3),
    Case("fsdp-x2-fp32", "fsdp", 2, precision="fp32"),
    Case("fsdp-x3", "fsdp", 3),
    Case("fsdp-x3-recomputed", "fsdp", 3, "--recompute"),
    Case("fsdp-x2-lamb", "fsdp", 2, optimizer="lamb"),
    Case("fsdp-x2-gptj", "fsdp", 2, model="gptj-tiny"),
    *(Case(f"zero{n}-x2", "zero", 2, f"--stage {n}", precision="fp32") for n in range(4)),
    *(
        Case(f"zero{n}-x4-accumulated", "zero", 4, f"--stage {n}", 1, precision="fp32")
        for n in range(4)
    ),
    Case("zero3-x2-gptj", "zero", 2, "--stage 3", model="gptj-tiny", precision="fp32"),
    Case("tp_pp-tp2", "tp_pp", 2, "--tp 2 --pp 1", 6, model="tiny"),
    Case("tp_pp-pp2", "tp_pp", 2, "--tp 1 --pp 2", 3, model="tiny"),
    Case("tp_pp-tp2-pp2", "tp_pp", 4, _GRID, 3, model="tiny"),
    Case("tp_pp-pp2-dp2", "tp_pp", 4, "--tp 1 --pp 2", 2, model="tiny"),
    Case("megatron-tp2", "megatron", 2, "--tp 2 --pp 1", 6, precision="fp32"),
    Case(
        "megatron-tp2-sequence-parallel",
        "megatron",
        2,
        "--tp 2 --pp 1 --sequence-parallel",
        6,
        precision="fp32",
    ),
    Case("megatron-pp2", "megatron", 2, "--tp 1 --pp 2", 3, precision="fp32"),
    Case(
        "megatron-pp4-virtual",
        "megatron",
        4,
        "--tp 1 --pp 4 --virtual-stages 2",
        3,
        precision="fp32",
    ),
    Case("megatron-tp2-pp2-dp2", "megatron", 8, f"{_GRID} --no-zero1", 3, precision="fp32"),
    Case("megatron-tp2-pp2-dp2-zero1", "megatron", 8, _GRID, 3, precision="fp32"),
    Case("megatron-mixture", "megatron", 1, f"{_MIXTURE} --tp 1", 3, **_EQUAL_TO_MIXTURE),
    Case(
        "megatron-mixture-ep2",
        "megatron",
        2,
        f"{_MIXTURE} --tp 1 --ep 2",
        3,
        **_EQUAL_TO_MIXTURE,
    ),
    Case(
        "megatron-mixture-tp2-ep2-dp2",
        "megatron",
        4,
        f"{_MIXTURE} --tp 2 --sequence-parallel --ep 2",
        3,
        **_EQUAL_TO_MIXTURE,
    ),
    Case("radius-density-1", "radius", 2, "--density 1 --bucket-mb 0.05"),
    Case("radius-interval-1", "radius", 3, "--interval 1"),
    Case("radius-dense-until", "radius", 2, f"--dense-until {STEPS}", 3),
    Case(
        "radius-simulated",
        SIMULATED,
        1,
        f"{_SPARSE} --ranks 3",
        4,
        compared_with="radius-simulated",
    ),
    Case("radius-sparse-x3", "radius", 3, _SPARSE, 4, compared_with="radius-simulated"),
)
CASES: dict[str, Case] = {case.name: case for case in _ALL}
