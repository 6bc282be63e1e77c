"""What a study runs: a small TOML file -> cells, refused in one line before anything runs if one makes no sense.

name = "laptop"
repeats = 3                      # rounds: each runs every cell once, in a new order, and the base between them
budget_minutes = 30              # begins no run that would end later; the same command resumes

[base]                           # axes, and any other setting of a Run
size = "4x128"                   # layers x width, heads of 32; or a recipe, such as gpt2-medium
batch = 8                        # sequences of one rank in a step
"loop.seq_len" = 64

[vary]                           # one at a time
precision = ["bf16", "fp64"]
strategy = ["serial", "zero3"]

[[cross]]                        # every combination
ranks = [1, 2]
batch = [8, 16]

[largest]                        # the most layers of this width that a limit of memory holds, by search
limit_mib = 64
width = 128
strategy = ["ddp", "fsdp"]
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from aiscale.config import ConfigError, Run, hint
from aiscale.recipes import RECIPES, recipe

STRATEGIES = {
    "serial": ("parallel.strategy=serial",),
    "ddp": ("parallel.strategy=ddp",),
    "zero1": ("parallel.strategy=zero", "parallel.zero_stage=1"),
    "zero2": ("parallel.strategy=zero", "parallel.zero_stage=2"),
    "zero3": ("parallel.strategy=zero", "parallel.zero_stage=3"),
    "fsdp": ("parallel.strategy=fsdp",),
    "tp": ("parallel.strategy=megatron", "parallel.tp={ranks}"),
    "pp": ("parallel.strategy=pipeline", "parallel.pp={ranks}", "parallel.schedule=gpipe"),
}
#: axis -> (its value in a base that leaves it out, the values there are; None: see `_check_value`)
AXES: dict[str, tuple] = {
    "size": ("4x128", None),
    "precision": ("fp32", ("fp32", "tf32", "bf16", "fp16", "fp64")),
    "batch": (8, None),
    "micro": (0, None),
    "ranks": (1, None),
    "strategy": ("ddp", tuple(STRATEGIES)),
    "data_kib": (32, None),
    "place": ("memory", ("memory", "mapped", "spooled", "staged")),
    "compile": (False, (True, False)),
    "phase": ("training", ("training", "fine-tuning", "inference")),
    "model": ("gpt", ("gpt", "bert")),
}
NEEDS_WHOLE_MODEL = ("serial", "ddp")  #: strategies whose ranks hold an ordinary module
FACTS = ("device", "cores", "threads_per_rank", "python", "torch", "commit")  #: of the machine, in each row
MOST_RANKS = 64  #: on one machine
#: settings of a Run that an axis sets
_OWNED = {"loop.precision": "precision", "loop.global_batch": "batch", "loop.micro_batch": "micro"}
_OWNED |= {"loop.compile": "compile", "parallel.strategy": "strategy", "parallel.zero_stage": "strategy"}
_OWNED |= {"model.n_layer": "size", "model.d_model": "size", "parallel.tp": "ranks", "parallel.pp": "ranks"}
_FOLDER = resources.files("aiscale.bench.study") / "studies"

Cell = dict[str, object]  #: axis or setting -> value


@dataclass(frozen=True, kw_only=True)
class Study:
    """A checked study."""

    name: str
    base: Cell
    cells: tuple[Cell, ...]  #: without the base
    largest: tuple[tuple[Cell, float], ...]  #: cells of which to search the most layers, and the limit in bytes
    repeats: int
    budget_minutes: float | None = None
    cell_minutes: float = 5  #: a run that takes longer is ended, and recorded as such
    memory_limit_mib: float | None = None  #: a rank that needs more than this is out of memory

    def label(self, cell: Cell) -> str:
        """What is different from the base: "precision bf16, ranks 2"."""
        changed = [f"{key} {_word(value)}" for key, value in cell.items() if value != self.base.get(key)]
        return ", ".join(changed) or "base"


def shipped() -> list[str]:
    return sorted(entry.name[:-5] for entry in _FOLDER.iterdir() if entry.name.endswith(".toml"))


def read_study(source: str | Path) -> Study:
    """The study of a TOML file, or one that the kit ships, by name. Raises ConfigError with one line."""
    known, file = shipped(), Path(source)
    if str(source) in known:
        text = (_FOLDER / f"{source}.toml").read_text(encoding="utf-8")
    else:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "not UTF-8 text"
            raise ConfigError(
                f"study {source} cannot be read ({why}): name a TOML file, or {', '.join(known)}"
            ) from None
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"study {source} is not TOML: {error}") from None
    return study_of({"name": file.stem, **tree})


def study_of(tree: dict) -> Study:
    """The study of a TOML file's contents."""
    amounts = ("repeats", "budget_minutes", "cell_minutes", "memory_limit_mib")
    _known(tree, ("name", *amounts, "base", "vary", "cross", "largest"))
    base = {**{axis: default for axis, (default, _) in AXES.items()}, **_table(tree, "base")}
    vary, crossed = _table(tree, "vary"), tree.get("cross", [])
    if not isinstance(crossed, list):
        raise ConfigError("study: cross is a table: write [[cross]], so that there can be several")
    grids = [{axis: values} for axis, values in vary.items()] + crossed
    cells = {_key(cell): cell for grid in grids for cell in _product(base, grid)}
    cells.pop(_key(base), None)
    search = _searches(base, _table(tree, "largest"))
    if not cells and not search:
        raise ConfigError("study: its grid is empty: give axes and values in [vary], [[cross]] or [largest]")
    numbers = {"repeats": 3, **{name: tree[name] for name in amounts if name in tree}}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"study: {name} is {value!r}: it must be a number above 0")
    numbers["repeats"] = int(numbers["repeats"])
    for cell in (base, *cells.values(), *(cell for cell, _ in search)):
        check(cell)
    return Study(name=str(tree["name"]), base=base, cells=tuple(cells.values()), largest=tuple(search), **numbers)


def run_of(cell: Cell) -> Run:
    """The run that a cell trains. Raises ConfigError if its settings contradict each other."""
    size, ranks = str(cell["size"]), cell["ranks"]
    if size in RECIPES:
        run = recipe(size)
    else:
        layers, width = (int(part) for part in size.split("x"))
        run = Run().override(f"model.n_layer={layers}", f"model.d_model={width}", f"model.n_head={max(1, width // 32)}")
        run = run.override("model.position=learned", "loop.seq_len=64")
    settings = [setting.format(ranks=ranks) for setting in STRATEGIES[cell["strategy"]]]
    settings += [f"{key}={_word(value)}" for key, value in cell.items() if "." in key]
    data_ranks = 1 if cell["strategy"] in ("tp", "pp") else ranks
    settings += [
        f"loop.precision={cell['precision']}",
        f"loop.global_batch={cell['batch'] * data_ranks}",
        f"loop.micro_batch={cell['micro']}",
        f"loop.compile={_word(cell['compile'])}",
    ]
    if not any(key.startswith("data.") for key in cell):
        settings.append("data.corpus=stdlib")
    return run.override(*settings)


def check(cell: Cell) -> None:
    """Raise ConfigError if the cell cannot run anywhere."""
    for key, value in cell.items():
        if key in _OWNED:
            raise ConfigError(f"study: {key} is set by the axis {_OWNED[key]}: vary that")
        if "." not in key:
            _known({key: value}, tuple(AXES))
            _check_value(key, value)
    always = ("size", "ranks", "strategy")
    said = [key for key, value in cell.items() if key in always or "." in key or value != AXES[key][0]]
    where = f"study, cell {', '.join(f'{key} {_word(cell[key])}' for key in said)}"
    strategy, ranks, whole = cell["strategy"], cell["ranks"], cell["strategy"] in NEEDS_WHOLE_MODEL
    reasons = {
        f"strategy {strategy} with {ranks} ranks: serial has one": strategy == "serial" and ranks > 1,
        f"strategy {strategy} cuts the model over ranks and needs 2 or more": strategy in ("tp", "pp") and ranks < 2,
        f"model bert with strategy {strategy}: only serial and ddp take a model that is not the kit's": (
            cell["model"] == "bert" and not whole
        ),
        f"phase fine-tuning with strategy {strategy}: only serial and ddp leave weights out of training": (
            cell["phase"] == "fine-tuning" and not whole
        ),
    }
    if why := [reason for reason, holds in reasons.items() if holds]:
        raise ConfigError(f"{where}: {why[0]}")
    try:
        run = run_of(cell)
        run.check_world(ranks)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    epoch = cell["data_kib"] * 1024 // run.loop.seq_len // run.loop.global_batch
    if epoch < 1:
        need = -(-run.loop.seq_len * run.loop.global_batch // 1024) + 1
        raise ConfigError(f"{where}: data_kib {cell['data_kib']} is less than one step reads: set at least {need}")


def identity(cell: Cell) -> str:
    """A short name of a cell's settings, the same in every study."""
    return hashlib.sha256(_key(cell).encode()).hexdigest()[:10]


def _check_value(axis: str, value: object) -> None:
    choices = AXES[axis][1]
    if choices and value not in choices:
        raise ConfigError(f"study: {axis} is {value!r}: it must be one of {', '.join(map(_word, choices))}")
    if axis == "size":
        layers, cross, width = str(value).partition("x")
        if str(value) not in RECIPES and not (cross and layers.isdigit() and width.isdigit()):
            raise ConfigError(f"study: size is {value!r}: write LAYERSxWIDTH, such as 4x128, or the name of a recipe")
    elif not choices:
        low = 0 if axis == "micro" else 1
        if type(value) is not int or value < low:
            raise ConfigError(f"study: {axis} is {value!r}: it must be a whole number, at least {low}")
        if axis == "ranks" and value > MOST_RANKS:
            raise ConfigError(f"study: ranks is {value}, but a study runs on one machine: at most {MOST_RANKS}")


def _product(base: Cell, grid: object) -> list[Cell]:
    if not isinstance(grid, dict) or not grid:
        raise ConfigError("study: its grid is empty: give axes and values in [vary], [[cross]] or [largest]")
    for axis, values in grid.items():
        if "." not in axis:
            _known({axis: values}, tuple(AXES))
        if not isinstance(values, list) or not values:
            raise ConfigError(f"study: {axis} has no values: write {axis} = [...] with at least one")
    return [{**base, **dict(zip(grid, values, strict=True))} for values in itertools.product(*grid.values())]


def _searches(base: Cell, table: dict) -> list[tuple[Cell, float]]:
    if not table:
        return []
    rest = {key: value for key, value in table.items() if key not in ("limit_mib", "width")}
    limit, width = table.get("limit_mib"), table.get("width")
    if not isinstance(limit, int | float) or limit <= 0 or not isinstance(width, int) or width <= 0:
        raise ConfigError("study: [largest] needs limit_mib and width, numbers above 0")
    cells = _product(base, rest) if rest else [base]
    # A pipeline needs as many layers as ranks; others take one.
    return [({**cell, "size": f"{cell['ranks']}x{width}"}, limit * 2**20) for cell in cells]


def _table(tree: dict, name: str) -> dict:
    table = tree.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"study: {name} is {table!r}: write it as a table, [{name}]")
    return table


def _known(given: dict, names: tuple[str, ...]) -> None:
    for key in given:
        if key not in names:
            said = hint(key, names, f"it may be {', '.join(names)}, or a setting: model.norm")
            raise ConfigError(f"study: unknown axis or field {key}: {said}")


def _key(cell: Cell) -> str:
    return json.dumps(cell, sort_keys=True)


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
