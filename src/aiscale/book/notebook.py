"""A notebook and what its first cells say about it: title, promise, minutes, ranks, hardware, parameters.

    for notebook in notebooks(["03"]):
        print(notebook.name, notebook.header.minutes, notebook.parameters)

The form that every notebook in notebooks/ has (`aiscale.book.form` checks it):

    1. markdown   # 03 · Data parallelism with DDP
                  <blank>
                  The promise: one sentence, which the gallery shows.
                  <blank>
                  | minutes | ranks | hardware | comes before |
                  |---|---|---|---|
                  | 35 | 4 | any laptop, 2 cores | 02_serial_to_mpi |
                  <blank>
                  ## Questions
                  - two to five of them
                  <blank>
                  ## You will be able to
                  - two to five things
    2. code       imports
    3. markdown   a word about the parameters
    4. code       tagged `parameters`: lines of `name = literal  # what it is`
    5. ...        the lesson, prose and code by turns; one figure may be tagged `cover`, for the gallery's card
    6. markdown   ## Key points: three to five lines
    7. markdown   ## Exercises, then code where they need it

A notebook in the folder appendix/ is called A1_words; it has no core path and no rule for its minutes.

`minutes` is a person's time on the core path (`aiscale.book.core`), `ranks` the most that the notebook starts, `comes
before` the notebook to have read, or `nothing`.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from aiscale.config import ConfigError, hint

if TYPE_CHECKING:
    from nbformat import NotebookNode

APPENDIX = "appendix"
COLUMNS = ("minutes", "ranks", "hardware", "comes before")
_TITLE = re.compile(r"# (?P<number>\d\d|A\d) · (?P<title>\S.*)")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list", tuple: "a list"}


class _Node(dict):
    """A JSON object whose fields are read as nbformat's are."""

    __getattr__ = dict.__getitem__


class BookError(ConfigError):
    """A bad request about notebooks; the message is one line that says what to change, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Header:
    """What the first cell says; `problems` lists what is missing or malformed."""

    number: str
    title: str
    promise: str
    minutes: int
    ranks: int
    hardware: str
    needs: str  #: the notebook to read before, or "nothing"
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Parameter:
    """One line of the cell tagged `parameters`."""

    name: str
    default: object
    comment: str

    def __str__(self) -> str:
        return f"{self.name}={self.default!r}"


@dataclass(frozen=True)
class Notebook:
    """A notebook file; everything else is read from it on demand."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def is_appendix(self) -> bool:
        return self.path.parent.name == APPENDIX

    @cached_property
    def cells(self) -> list[NotebookNode]:
        """The cells with their source and tags: without nbformat, whose import takes a second or two."""
        try:
            cells = json.loads(self.path.read_text(encoding="utf-8"), object_hook=_Node)["cells"]
            for cell in cells:
                cell["source"] = "".join(cell["source"])
                cell["metadata"], cell["cell_type"]  # or it is no notebook of this format
            return cells
        except (OSError, ValueError, KeyError, TypeError):
            return self.content.cells

    @cached_property
    def content(self) -> NotebookNode:
        return read(self.path)

    @cached_property
    def header(self) -> Header:
        first = next(iter(self.cells), None)
        return parse_header(first.source if first is not None and first.cell_type == "markdown" else "")

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        cell = next((cell for cell in self.cells if "parameters" in tags(cell)), None)
        return parse_parameters(cell.source) if cell is not None else {}

    def accept(self, given: Mapping[str, object]) -> dict[str, object]:
        """`given` with every value converted to the parameter's type; text from a command line is parsed.

        Raises BookError on a name that this notebook does not have, or a value of another type.
        """
        return {name: self._accept(name, value) for name, value in given.items()}

    def _accept(self, name: str, value: object) -> object:
        if name not in self.parameters:
            has = f"its parameters are {', '.join(map(str, self.parameters.values())) or 'none'}"
            raise BookError(f"{self.name} has no parameter {name}: {hint(name, self.parameters, has)}")
        default, meaning = self.parameters[name].default, self.parameters[name].comment
        try:
            accepted = _convert(value, default)
        except ValueError:
            kind = _WORDS.get(type(default), "a literal")
            raise BookError(f"{self.name}: {name} is {value!r}, but it must be {kind}, as {default!r} is") from None
        if _positive(default) and not _positive(accepted):  # counts and sizes, which a late cell would refuse
            raise BookError(f"{self.name}: {name} is {value!r}, but it must be greater than 0 ({meaning or default})")
        return accepted


def notebooks(names: Sequence[str] | None = None, root: str | Path | None = None) -> list[Notebook]:
    """The notebooks of a folder in reading order, appendices last, or those that `names` select by name, number or
    path."""
    root = Path(root) if root else find_root()
    paths = [*sorted(root.glob("[0-9][0-9]_*.ipynb")), *sorted((root / APPENDIX).glob("*.ipynb"))]
    return [Notebook(path) for path in choose("notebook", names, paths, root)]


def choose(what: str, names: Sequence[str] | None, paths: Iterable[Path], root: Path) -> list[Path]:
    """Of the files in `root`, all, or those that `names` select by name, number, word or path.

    what: notebook, for messages. Raises BookError with what there is if a name selects nothing.
    """
    found = {path.stem: path for path in paths}
    if not names and not found:
        raise BookError(f"there is no {what} in {root}: run this in the project's folder, or name files")
    return [_chosen(what, name, found) for name in names or found]


def _chosen(what: str, name: str, found: Mapping[str, Path]) -> Path:
    there = f"there are {', '.join(found)}" if found else "there are none"
    kinds = {path.suffix for path in found.values()} or {".ipynb", ".md"}
    if Path(name).suffix in kinds - {".py"}:  # a path; graders are chosen by name alone
        if not Path(name).is_file():
            raise BookError(f"there is no file {name}: check the path, or name a {what}: {there}")
        return Path(name)
    if name in found:
        return found[name]
    for stem, path in found.items():
        number, _, word = stem.lower().partition("_")
        if name.lower() in (stem.lower(), number, word) or name.zfill(2) == number:
            return path
    raise BookError(f"no {what} is called {name}: {hint(name, found, there)}")


def find_root() -> Path:
    """The folder notebooks/ of the working directory, else that of the source tree this package is installed from."""
    here, tree = Path("notebooks"), Path(__file__).resolve().parents[3] / "notebooks"
    return here if here.is_dir() or not tree.is_dir() else tree


def read(path: str | Path) -> NotebookNode:
    """The notebook in a file; raises BookError if it is not one."""
    import nbformat  # a slow import: jsonschema compiles a grammar, a second or two

    try:
        return nbformat.read(path, as_version=4)
    except OSError as error:
        raise BookError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # nbformat passes on errors of its JSON reader and its validator
        reason = str(error).splitlines()[0][:120]
        raise BookError(f"{path} is not a notebook ({reason}): open and save it in Jupyter, or restore it") from None


def tags(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def parse_header(source: str) -> Header:
    """Parse the first cell; a malformed field is empty and listed in `problems`."""
    problems = []
    lines = [line.rstrip() for line in source.strip().splitlines()]
    title = _TITLE.fullmatch(lines[0]) if lines else None
    if not title:
        problems.append("the first cell does not start with a title of the form '# 03 · Title'")
    body = [line for line in lines[1:] if line]
    promise = body[0] if body and body[0][0] not in "#|-*" else ""
    if not promise:
        problems.append("no promise stands under the title: one sentence, in one line")
    row = _table_row(lines)
    if row is None:
        problems.append(f"the first cell has no table with the columns {' | '.join(COLUMNS)}")
        row = {}
    numbers = {}
    for column in ("minutes", "ranks"):
        text = row.get(column, "")
        numbers[column] = int(text) if text.isdecimal() else 0
        if row and not numbers[column]:
            problems.append(f"{column} is {text!r}: it must be a whole number of at least 1")
    for heading in ("Questions", "You will be able to"):
        count = _bullets(lines, heading)
        if not 2 <= count <= 5:
            problems.append(f"'## {heading}' has {count} bullets: it must have 2 to 5")
    return Header(
        number=title["number"] if title else "",
        title=title["title"] if title else (lines[0].lstrip("# ") if lines else ""),
        promise=promise,
        hardware=row.get("hardware", ""),
        needs=row.get("comes before", ""),
        problems=tuple(problems),
        **numbers,
    )


def _table_row(lines: Sequence[str]) -> dict[str, str] | None:
    table = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")]
    if len(table) != 3 or tuple(table[0]) != COLUMNS or len(table[2]) != len(COLUMNS):
        return None
    return dict(zip(COLUMNS, table[2], strict=True))


def _bullets(lines: Sequence[str], heading: str) -> int:
    if f"## {heading}" not in lines:
        return 0
    below = lines[lines.index(f"## {heading}") + 1 :]
    end = next((i for i, line in enumerate(below) if line.startswith("#")), len(below))
    return sum(line.startswith("- ") for line in below[:end])


def parse_parameters(source: str) -> dict[str, Parameter]:
    """The lines `name = literal  # comment` of a parameters cell; raises BookError on any other statement."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise BookError(f"the parameters cell is not Python (line {error.lineno}): {error.msg}") from None
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    found = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        try:
            if not isinstance(target, ast.Name):
                raise ValueError
            default = ast.literal_eval(node.value)
        except ValueError:
            line = source.splitlines()[node.lineno - 1].strip()
            raise BookError(f"the parameters cell holds {line!r}: write only `name = literal`") from None
        found[target.id] = Parameter(target.id, default, comments.get(node.end_lineno, ""))
    return found


def _positive(value: object) -> bool:
    """Whether a value is a number, or a list of numbers, above 0."""
    items = value if isinstance(value, list | tuple) else [value]
    return bool(items) and all(type(item) in (int, float) and item > 0 for item in items)


def _convert(value: object, default: object) -> object:
    """`value` as the type of `default`; raises ValueError if it has another."""
    if isinstance(value, str) and isinstance(default, bool):
        value = {"true": True, "false": False}.get(value.lower(), value)
    elif isinstance(value, str) and not isinstance(default, str):
        with contextlib.suppress(ValueError, SyntaxError):  # otherwise it stays text, which is accepted only for None
            value = ast.literal_eval(value)
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(default, list | tuple) and isinstance(value, list | tuple):
        return type(default)(_convert(item, default[0]) if default else item for item in value)
    if default is not None and type(value) is not type(default):
        raise ValueError
    return value
