"""What a study runs: a small TOML file, such as studies/laptop.toml, -> cells.

    study = read_study("laptop")
    study.base, study.cells             # {"size": "4x128", "batch": 8, ...}, and with some changed
    args_of(study.cells[0])             # the options of its trainer
    run_of(study.cells[0])              # the same for the formulas

[base] sets axes, and any other option of the trainers by its name, such as length = 64; [vary]
lists values of which one is changed at a time, [[cross]] values of which every combination is run.
A study that makes no sense is refused in one line before anything runs.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from aiscale.errors import ConfigError, hint
from aiscale.plan import options as formulas
from aiscale.plan.config import Run
from aiscale.train.layout import misfit
from aiscale.train.options import TRAINERS, options

#: axis strategy -> its trainer, and that one's own options; how many ranks there are says the rest
STRATEGIES = {
    "serial": ("serial", {}),
    "ddp": ("ddp", {}),
    "zero1": ("zero", {"stage": 1}),
    "zero2": ("zero", {"stage": 2}),
    "zero3": ("zero", {"stage": 3}),
    "zero2-offload": ("zero", {"stage": 2}),  # optimizer and fp32 weights in the host's memory
    "zero3-offload": ("zero", {"stage": 3}),
    "fsdp": ("fsdp", {}),
    "tp": ("megatron", {"tp": "ranks", "pp": 1}),
    "pp": ("tp_pp", {"tp": 1, "pp": "ranks"}),
    "3d": ("megatron", {"tp": 2, "pp": "1 or 2"}),  # dp: what is left
}
#: axis -> its value in a base that leaves it out
AXES = {
    "size": "4x128",  #: layers x width, heads of 32; or another --model: gpt2-medium, models/gpt2
    "precision": "fp32",
    "batch": 8,  #: sequences of one rank in a step
    "micro": 0,  #: sequences of a micro-batch; 0: all of the rank's
    "ranks": 1,
    "strategy": "ddp",
    "text": "stdlib",  #: what an epoch reads: Python's own sources, a text file, a folder of such
    "data_kib": 32,  #: text of an epoch
    "place": "spooled",  #: of the data: on a disk, each window read when it is needed; or in memory
    "compile": False,
    "phase": "training",
}
CHOICES = {
    "strategy": (*STRATEGIES,),
    "precision": ("fp32", "tf32", "bf16", "fp16", "fp64"),
    "place": ("memory", "spooled"),
    "phase": ("training", "fine-tuning", "inference"),
}
#: option of a trainer -> the axis that sets it
SET_BY_AXES = {"model": "size", "micro_batch": "micro", "steps": "data_kib"}
SET_BY_AXES |= dict.fromkeys(("bf16", "fp16", "fp64"), "precision")
SET_BY_AXES |= dict.fromkeys(("stage", "tp", "pp"), "strategy")
NEVER = (
    "save",
    "save_every",
    "save_minutes",
    "evaluate_every",
)  #: they would take time of an epoch
WARM_UP = 3  #: steps before the two epochs
LR = 1e-4  #: a loss that is no number would end a run, and the rate costs no time
STUDIES = resources.files("aiscale.measure.study") / "studies"

Cell = dict[str, object]  #: axis or setting -> value


@dataclass(frozen=True, kw_only=True)
class Study:
    """A checked study."""

    name: str
    base: Cell
    cells: tuple[Cell, ...]  #: without the base
    repeats: int = 3
    budget_minutes: float | None = None
    cell_minutes: float = 5  #: a run that takes longer is ended, and recorded as such

    def label(self, cell: Cell) -> str:
        """What is different from the base: "precision bf16, ranks 2"."""
        return (
            ", ".join(
                f"{key} {value}" for key, value in cell.items() if value != self.base.get(key)
            )
            or "base"
        )


def read_study(source: str | Path) -> Study:
    """The study of a TOML file, or one that the kit ships, by name. Raises ConfigError."""
    shipped = sorted(file.name.removesuffix(".toml") for file in STUDIES.iterdir())
    file = STUDIES / f"{source}.toml" if str(source) in shipped else Path(source)
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # not there, or not TOML
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"study {source} cannot be read ({why}): name a TOML file, or {', '.join(shipped)}"
        ) from None
    return study_of({"name": Path(source).stem, **tree})


def study_of(tree: dict) -> Study:
    """The study of a TOML file's contents."""
    own = ("name", "repeats", "budget_minutes", "cell_minutes")
    _require_names(tree, (*own, "base", "vary", "cross"))
    base = AXES | tree.get("base", {})
    grids = [{axis: values} for axis, values in tree.get("vary", {}).items()] + tree.get(
        "cross", []
    )
    changes = [
        zip(grid, values, strict=True)
        for grid in grids
        for values in itertools.product(*grid.values())
    ]
    cells = [base | dict(change) for change in changes]
    cells = [cell for i, cell in enumerate(cells) if cell not in (base, *cells[:i])]
    for cell in (base, *cells):
        check(cell)
    return Study(
        base=base, cells=tuple(cells), **{name: tree[name] for name in own if name in tree}
    )


def trainer_of(cell: Cell) -> str:
    trainer, _ = STRATEGIES[cell["strategy"]]
    return trainer


def epoch_of(cell: Cell) -> int:
    """Steps in which the text is read once."""
    chosen = options_of(cell)
    return cell["data_kib"] * 1024 // (chosen["length"] * chosen["batch"])


def options_of(cell: Cell) -> dict[str, object]:
    """The options of the cell's trainer by their names, but steps, and where it reads and saves."""
    ranks, strategy = cell["ranks"], cell["strategy"]
    _, own = STRATEGIES[strategy]
    sizes = {"ranks": ranks, "1 or 2": 1 if ranks % 4 else 2}
    own = {name: sizes.get(value, value) for name, value in own.items()}
    copies = max(1, ranks // (own.get("tp", 1) * own.get("pp", 1)))
    batch = cell["batch"] * (1 if strategy in ("tp", "pp") else ranks)
    own |= {"model": cell["size"], "batch": batch, "micro_batch": cell["micro"] or batch // copies}
    own |= {"compile": cell["compile"]}
    if cell["precision"] not in ("fp32", "tf32"):
        own[cell["precision"]] = True
    given = {name: value for name, value in cell.items() if name not in AXES}
    return {"length": 64, "lr": LR, **given, **own}


def words_of(chosen: dict[str, object]) -> list[str]:
    """{"length": 64, "compile": True} -> ["--length", "64", "--compile"]"""
    words = []
    for name, value in chosen.items():
        if value is not False:
            words.append("--" + name.replace("_", "-"))
            words += [] if value is True else [str(value)]
    return words


def args_of(cell: Cell) -> argparse.Namespace:
    """What the cell's trainer reads from its options. Raises ConfigError if it would refuse."""
    parser = options("serial" if cell["phase"] == "inference" else trainer_of(cell))

    def refuse(message: str):
        raise ConfigError(f"strategy {cell['strategy']}: {message}")

    parser.error = refuse
    return parser.parse_args(words_of(options_of(cell)))


def run_of(cell: Cell) -> Run:
    """What the cell computes, for the formulas. Raises ConfigError if settings contradict."""
    return formulas.run_of(trainer_of(cell), args_of(cell))


def check(cell: Cell) -> None:
    """Raise ConfigError if the cell cannot run anywhere."""
    _require_names(cell, (*AXES, *_defaults()))
    for name, default in {**_defaults(), **AXES}.items():
        value = cell.get(name, default)
        if default is not None and type(value) is not type(default):
            raise ConfigError(f"study: {name} is {value!r}: write it like {default!r}")
        if value not in (choices := CHOICES.get(name, [value])):
            raise ConfigError(f"study: {name} is {value!r}: it must be one of {', '.join(choices)}")
    try:
        _check_together(cell)
    except ConfigError as error:
        about = ", ".join(f"{key} {value}" for key, value in cell.items() if value != AXES.get(key))
        raise ConfigError(f"study, cell {about or 'of defaults'}: {error}") from None


def _check_together(cell: Cell) -> None:
    ranks, strategy = cell["ranks"], cell["strategy"]
    for name in cell:
        if name in SET_BY_AXES:
            raise ConfigError(f"{name} is set by the axis {SET_BY_AXES[name]}: vary that")
        if name in NEVER:
            raise ConfigError(f"a study saves and evaluates nothing: leave {name} out")
    if strategy == "serial" and ranks != 1:
        raise ConfigError(f"strategy serial uses 1 rank, but ranks is {ranks}: take ddp")
    if cell["precision"] == "fp16" and trainer_of(cell) != "megatron":
        raise ConfigError(f"strategy {strategy} has no fp16: take tp or 3d, or bf16")
    if cell["phase"] == "inference" and strategy not in ("serial", "ddp"):
        raise ConfigError(
            f"phase inference, strategy {strategy}: take serial or ddp, each rank a whole model"
        )
    if cell["phase"] == "fine-tuning" and not any(Path(cell["size"]).glob("*.safetensors")):
        raise ConfigError(
            f"phase fine-tuning, size {cell['size']}: it begins with weights, so size must be "
            "a folder of transformers with config.json and *.safetensors"
        )
    run, args = run_of(cell), args_of(cell)
    if reason := misfit(args, ranks):
        raise ConfigError(reason)
    micro_batches, _ = run.loop.micro_batches(run.parallel.data_parallel(ranks))
    if strategy == "pp" and micro_batches < ranks:
        raise ConfigError(
            f"pp has {micro_batches} micro-batches for {ranks} stages: lower micro, or raise batch"
        )
    if not epoch_of(cell):
        need = -(-args.length * args.batch // 1024)
        raise ConfigError(
            f"data_kib {cell['data_kib']} is less than one step reads: set at least {need}"
        )


@functools.cache
def _defaults() -> dict[str, object]:
    """Options of all trainers, and their defaults."""
    found: dict[str, object] = {}
    for trainer in TRAINERS:
        found |= vars(options(trainer).parse_args([]))
    return found | {"config": None}  # an open file, else


def _require_names(keys: Iterable[str], names: tuple[str, ...]) -> None:
    for key in keys:
        if key not in names:
            remedy = hint(key, names, "it may be an axis, or an option of the trainer: length")
            raise ConfigError(f"study: unknown axis or field {key}: {remedy}")
