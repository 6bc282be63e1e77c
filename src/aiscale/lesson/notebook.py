"""Notebooks by name, and what their first cell says: title, promise, minutes, ranks, hardware.

    # 03 · Data parallelism with DDP
    <blank>
    The promise, a paragraph that the site's card shows.
    <blank>
    | minutes | ranks | hardware | comes before |
    |---|---|---|---|
    | 35 | 4 | any laptop, 2 cores | 02_ranks |

`minutes` is a person's time without the cells tagged `optional`, `ranks` the most that the notebook
starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from aiscale.errors import ConfigError, hint

if TYPE_CHECKING:
    from nbformat import NotebookNode

APPENDIX = "appendix"
OPTIONAL = "optional"  #: the tag of cells that are not on the core path
_HEADER = re.compile(
    r"# (?P<number>\d\d|A\d) · (?P<title>\S.*)\n\n(?P<promise>\S.*)\n\n"
    r"\| minutes \| ranks \| hardware \| comes before \|\n\|[-|]+\|\n"
    r"\| (?P<minutes>\d+) \| (?P<ranks>\d+) \| (?P<hardware>.+?) \| (?P<needs>.+?) \|"
)


class LessonError(ConfigError):
    """A bad request about notebooks: one line that says what to change, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Header:
    number: str
    title: str
    promise: str
    minutes: int
    ranks: int
    hardware: str
    needs: str  #: the notebook to read before, or "nothing"


@dataclass(frozen=True)
class Notebook:
    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def is_appendix(self) -> bool:
        return self.path.parent.name == APPENDIX

    @property
    def cells(self) -> list[NotebookNode]:
        return self.content.cells

    @cached_property
    def content(self) -> NotebookNode:
        return read(self.path)

    @cached_property
    def header(self) -> Header:
        """Raises LessonError if the first cell does not begin as a lesson's does."""
        header = _HEADER.match(self.cells[0].source) if self.cells else None
        if not header:
            raise LessonError(
                f"{self.path} does not begin with a lesson's title, promise and table"
            )
        values = header.groupdict()
        return Header(**values | {"minutes": int(values["minutes"]), "ranks": int(values["ranks"])})


def notebooks(names: Sequence[str] | None = None, root: str | Path | None = None) -> list[Notebook]:
    """The notebooks of a folder in reading order, appendices last, or those that `names` select."""
    root = Path(root) if root else find_root()
    paths = [*sorted(root.glob("[0-9][0-9]_*.ipynb")), *sorted((root / APPENDIX).glob("*.ipynb"))]
    return [Notebook(path) for path in choose("notebook", names, paths, root)]


def choose(what: str, names: Sequence[str] | None, paths: Iterable[Path], root: Path) -> list[Path]:
    """Of the files in `root`, all, or those that `names` select by name, number, word or path."""
    there = {path.stem: path for path in paths}
    if not names and not there:
        raise LessonError(
            f"there is no {what} in {root}: run this in the project's folder, or name files"
        )
    return [_chosen(what, name, there) for name in names or there]


def _chosen(what: str, name: str, there: Mapping[str, Path]) -> Path:
    if Path(name).suffix in (".ipynb", ".md") and Path(name).is_file():
        return Path(name)
    for stem, path in there.items():
        number, _, word = stem.lower().partition("_")
        if name.lower() in (stem.lower(), number, word) or name.zfill(2) == number:
            return path
    names = f"there are {', '.join(there)}" if there else "there are none"
    raise LessonError(f"no {what} is called {name}: {hint(name, there, names)}")


def find_root() -> Path:
    """The folder notebooks/ here, else that of the source tree this package is installed from."""
    here, tree = Path("notebooks"), Path(__file__).resolve().parents[3] / "notebooks"
    return here if here.is_dir() or not tree.is_dir() else tree


def read(path: str | Path) -> NotebookNode:
    """The notebook in a file; raises LessonError if it is not one."""
    import nbformat  # a slow import: jsonschema compiles a grammar, a second or two

    try:
        return nbformat.read(path, as_version=4)
    except nbformat.reader.NotJSONError as error:
        raise LessonError(f"{path} is not a notebook ({str(error)[:120]})") from None


def tags(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])
