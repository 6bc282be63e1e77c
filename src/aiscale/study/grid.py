"""What a study runs: a small TOML file, such as studies/laptop.toml, -> cells.

    study = read_study("laptop")
    study.base, study.cells             # {"size": "4x128", "batch": 8, ...}, and the same with some of it changed
    run_of(study.cells[0])              # what it trains

[base] sets axes, and any other setting of a Run, such as "loop.seq_len" = 64; [vary] lists values of which one is
changed at a time, [[cross]] values of which every combination is run. A study that makes no sense is refused in one
line before anything runs.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from aiscale.config import ConfigError, Run, hint
from aiscale.recipes import RECIPES, recipe

STRATEGIES = {
    "serial": {"strategy": "serial"},
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero", "zero_stage": 1},
    "zero2": {"strategy": "zero", "zero_stage": 2},
    "zero3": {"strategy": "zero", "zero_stage": 3},
    "fsdp": {"strategy": "fsdp"},
    "tp": {"strategy": "megatron", "tp": "ranks"},
    "pp": {"strategy": "pipeline", "pp": "ranks", "schedule": "gpipe"},
    "3d": {"strategy": "megatron", "tp": 2, "pp": "1 or 2"},  # dp: what is left
}
#: axis -> its value in a base that leaves it out
AXES = {
    "size": "4x128",  #: layers x width, heads of 32; or a recipe, such as gpt2-medium
    "precision": "fp32",
    "batch": 8,  #: sequences of one rank in a step
    "micro": 0,  #: sequences of a micro-batch; 0: all of the rank's
    "ranks": 1,
    "strategy": "ddp",
    "data_kib": 32,  #: text of an epoch
    "place": "memory",  #: of the data
    "compile": False,
    "phase": "training",
}
CHOICES = {"strategy": (*STRATEGIES,), "place": ("memory", "spooled"), "phase": ("training", "inference")}
STUDIES = resources.files("aiscale.study") / "studies"

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
        return ", ".join(f"{key} {value}" for key, value in cell.items() if value != self.base.get(key)) or "base"


def read_study(source: str | Path) -> Study:
    """The study of a TOML file, or one that the kit ships, by name. Raises ConfigError with one line."""
    shipped = sorted(file.name.removesuffix(".toml") for file in STUDIES.iterdir())
    file = STUDIES / f"{source}.toml" if str(source) in shipped else Path(source)
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # not there, or not TOML
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"study {source} cannot be read ({why}): name a TOML file, or {', '.join(shipped)}") from None
    return study_of({"name": Path(source).stem, **tree})


def study_of(tree: dict) -> Study:
    """The study of a TOML file's contents."""
    own = ("name", "repeats", "budget_minutes", "cell_minutes")
    _require_names(tree, (*own, "base", "vary", "cross"))
    base = AXES | tree.get("base", {})
    grids = [{axis: values} for axis, values in tree.get("vary", {}).items()] + tree.get("cross", [])
    changes = [zip(grid, values, strict=True) for grid in grids for values in itertools.product(*grid.values())]
    cells = [base | dict(change) for change in changes]
    cells = [cell for i, cell in enumerate(cells) if cell not in (base, *cells[:i])]
    for cell in (base, *cells):
        check(cell)
    return Study(base=base, cells=tuple(cells), **{name: tree[name] for name in own if name in tree})


def run_of(cell: Cell) -> Run:
    """The run that a cell trains. Raises ConfigError if its settings contradict each other."""
    size, ranks, strategy = cell["size"], cell["ranks"], cell["strategy"]
    overrides = {key: value for key, value in cell.items() if "." in key}
    sizes = {"ranks": ranks, "1 or 2": 1 if ranks % 4 else 2}
    own = {f"parallel.{key}": sizes.get(value, value) for key, value in STRATEGIES[strategy].items()}
    own |= {"loop.precision": cell["precision"], "loop.micro_batch": cell["micro"], "loop.compile": cell["compile"]}
    own |= {"loop.global_batch": cell["batch"] * (1 if strategy in ("tp", "pp") else ranks)}
    if size in RECIPES:
        run = recipe(size)
    else:
        layers, _, width = size.partition("x")
        if not (layers.isdigit() and width.isdigit()):
            raise ConfigError(f"size is {size}: write LAYERSxWIDTH, such as 4x128, or the name of a recipe")
        own |= {"model.n_layer": layers, "model.d_model": width, "model.n_head": max(1, int(width) // 32)}
        run = Run().override("model.position=learned", "loop.seq_len=64")
    if twice := overrides.keys() & own.keys():
        raise ConfigError(f"{twice.pop()} is set by an axis: vary that")
    return run.override(*(f"{key}={value}" for key, value in {"data.corpus": "stdlib", **overrides, **own}.items()))


def check(cell: Cell) -> None:
    """Raise ConfigError if the cell cannot run anywhere."""
    _require_names([key for key in cell if "." not in key], tuple(AXES))
    for axis, default in AXES.items():
        if type(cell[axis]) is not type(default):
            raise ConfigError(f"study: {axis} is {cell[axis]!r}: write it like {default!r}")
        if cell[axis] not in (choices := CHOICES.get(axis, [cell[axis]])):
            raise ConfigError(f"study: {axis} is {cell[axis]!r}: it must be one of {', '.join(choices)}")
    try:
        run = run_of(cell)
        run.check_world(cell["ranks"])
        if cell["data_kib"] * 1024 // run.loop.seq_len < run.loop.global_batch:
            need = -(-run.loop.seq_len * run.loop.global_batch // 1024) + 1
            raise ConfigError(f"data_kib {cell['data_kib']} is less than one step reads: set at least {need}")
    except ConfigError as error:
        about = ", ".join(f"{key} {value}" for key, value in cell.items() if value != AXES.get(key))
        raise ConfigError(f"study, cell {about or 'of defaults'}: {error}") from None


def _require_names(keys: Iterable[str], names: tuple[str, ...]) -> None:
    for key in keys:
        if key not in names:
            remedy = hint(key, names, f"it may be {', '.join(names)}, or a setting: model.norm")
            raise ConfigError(f"study: unknown axis or field {key}: {remedy}")
