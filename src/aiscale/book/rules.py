"""What single cells of a notebook may hold: the parts of `aiscale.book.anatomy` that read code.

Code is parsed, not searched, wherever that is possible; lines of IPython (`%matplotlib inline`, `%%px`) are set aside
first. ruff reads the notebook as a whole, cells for the ranks included.
"""

from __future__ import annotations

import ast
import copy
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat

from aiscale.book.notebook import BookError, Notebook

#: Calls on `plots` or `plt` that leave no figure.
NOT_DRAWING = re.compile(r"use_style|close|format_\w+|set_loglevel")
#: Names that every rank has without importing them.
ON_RANKS = ("rank", "world_size", "world", "torch", "dist")
RUFF = ("--line-length=120", "--config=builtins = " + json.dumps([*ON_RANKS]))
RUFF_FORMAT = ("format", "--isolated", "--target-version=py311")
_HIDDEN = "# IPython: %"  #: what a line of IPython in a %%px cell looks like to ruff
RUFF_CHECK = ("check", "--isolated", "--select=E,F,I,UP,B,W", "--output-format=json", "--target-version=py311")

_OUTSIDE = (
    (re.compile(r"https?://"), "holds a network address: notebooks run offline"),
    (re.compile(r"\bload_dataset\("), "loads a data set from a hub: use aiscale.data"),
    (re.compile(r"\bfrom_pretrained\(\s*[\"'](?![./])"), "loads weights from a hub: give it a folder made here"),
    (re.compile(r"\b(urlretrieve|snapshot_download|hf_hub_download)\b|^\s*(wget|curl)\b", re.M), "downloads something"),
    (re.compile(r"^\s*[%!]+\s*(pip|conda|mamba|uv)\b", re.M), "installs packages: they belong in pyproject.toml"),
    (re.compile(r"^\s*!|=\s*!", re.M), "uses !command, whose failure goes unseen: use %%bash or subprocess.run"),
)
_IMAGE = re.compile(r"!\[[^\]]*\]\(\s*(?:https?:)?//|<(?:img|script|iframe|video|link)\b[^>]*(?:https?:)?//", re.I)


def in_code(source: str) -> Iterator[str]:
    """What a code cell must not hold."""
    for pattern, problem in _OUTSIDE:
        if pattern.search(source):
            yield problem
    if not is_foreign(source) and _parse(source) is None:
        yield "is not Python"


def in_prose(source: str) -> Iterator[str]:
    """What a markdown cell must not hold."""
    if _IMAGE.search(source):
        yield "shows something from the network: notebooks are read offline"
    if "```mermaid" in source:
        yield "holds a mermaid diagram, which is drawn by a script from the network: use a plot or text"
    if re.search(r"<script\b", source, re.I):
        yield "holds a script"
    if re.search(r"^# ", without_fences(source), re.M) and not re.match(r"# \d\d · ", source):
        yield "has a heading of the first level: only the title is one"


def without_fences(source: str) -> str:
    """Markdown without its blocks of code, in which # is no heading."""
    return re.sub(r"^(```|~~~).*?^\1", "", source, flags=re.M | re.S)


def is_foreign(source: str) -> bool:
    """Whether a cell magic other than %%px (or %%time, %%capture) makes the cell something else than Python."""
    first = source.lstrip().split(None, 1)[0] if source.strip() else ""
    return first.startswith("%%") and first not in ("%%px", "%%time", "%%timeit", "%%capture")


def python_of(source: str) -> str:
    """The cell with lines of IPython turned into comments, so that line numbers stay."""
    return re.sub(r"^(\s*)([%!])", r"\1# \2", source, flags=re.M)


def _parse(source: str) -> ast.Module | None:
    try:
        return ast.parse(python_of(source))
    except SyntaxError:
        return None


def _calls(source: str) -> Iterator[tuple[str, str]]:
    """(owner, method) of every call of the form owner.method(...)."""
    if is_foreign(source):
        return
    for node in ast.walk(_parse(source) or ast.Module([], [])):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if isinstance(node.func.value, ast.Name):
                yield node.func.value.id, node.func.attr


def draws(source: str) -> bool:
    """Whether the cell leaves a figure."""
    return any(owner in ("plots", "plt") and not NOT_DRAWING.fullmatch(name) for owner, name in _calls(source))


def is_imports(source: str) -> bool:
    """Whether the cell holds imports only, and the choice of the plots' style."""
    tree = _parse(source)
    return tree is not None and all(
        isinstance(node, ast.Import | ast.ImportFrom) or ast.unparse(node) == "plots.use_style()" for node in tree.body
    )


def started(source: str) -> Iterator[str | None]:
    """The names that hold what `cluster.start(...)` gave; None for one without a name."""
    tree = _parse(source)
    if tree is None:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.withitem) and _is_start(node.context_expr):
            node.context_expr.func.attr = "closed by with"
        elif isinstance(node, ast.Assign) and _is_start(node.value) and isinstance(node.targets[0], ast.Name):
            node.value.func.attr = "named"
            yield node.targets[0].id
    yield from (None for node in ast.walk(tree) if _is_start(node))


def _is_start(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "cluster.start"


def stopped(source: str) -> Iterator[str]:
    """The names on which `.stop()` is called."""
    return (owner for owner, name in _calls(source) if name == "stop")


def lint(notebook: Notebook) -> list[str]:
    """What ruff says of a notebook, by cell and line."""
    text = nbformat.writes(_for_ruff(notebook.content))
    found = json.loads(_ruff([*RUFF_CHECK, *RUFF], notebook.path, text).stdout or "[]")
    problems = [
        f"cell {item['cell']} line {item['location']['row']}: {item['code'] or 'syntax'} {item['message']}"
        for item in found
    ]
    if not any(problem.startswith("syntax", problem.index(": ") + 2) for problem in problems):
        formatted = _ruff([*RUFF_FORMAT, "--check", RUFF[0]], notebook.path, text).returncode == 0
        problems += [] if formatted else ["its code is not formatted: strip it, which formats it too"]
    return problems


def format_code(content: nbformat.NotebookNode, path: Path) -> None:
    """Format the code of a notebook in place, that of its %%px cells too."""
    done = _ruff([*RUFF_FORMAT, RUFF[0]], path, nbformat.writes(_for_ruff(content)))
    if done.returncode:
        raise BookError(f"{path} holds code that ruff cannot format: {done.stderr.strip().splitlines()[0]}")
    for cell, formatted in zip(content.cells, nbformat.reads(done.stdout, as_version=4).cells, strict=True):
        cell.source = re.sub(f"^{_HIDDEN}", "%", formatted.source, flags=re.M)


def _for_ruff(content: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A copy in which %%px cells are Python: ruff passes over cells with a cell magic."""
    shown = copy.deepcopy(content)
    for cell in shown.cells:
        if cell.cell_type == "code" and cell.source.startswith("%%px"):
            cell.source = re.sub("^%", _HIDDEN, cell.source, flags=re.M)
    return shown


def _ruff(options: list[str], path: Path, text: str) -> subprocess.CompletedProcess:
    beside = Path(sys.executable).with_name("ruff")
    ruff = str(beside) if beside.exists() else shutil.which("ruff")
    if not ruff:
        raise BookError("ruff is not installed, which reads the notebooks' code: pip install 'aiscale[test]'")
    command = [ruff, *options, f"--stdin-filename={path.name}", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode == 2 and not done.stdout and "Failed to parse" not in done.stderr:
        raise BookError(f"ruff could not read {path}: {done.stderr.strip().splitlines()[0]}")
    return done
