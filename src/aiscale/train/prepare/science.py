"""Documents of science without a network: documentation of installed packages, by discipline.

A document is a docstring, or a text that a C function gets as its docstring. Nothing is imported:
the files are read as text, about 40 MB of documentation in seconds.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from aiscale.errors import ConfigError

#: Discipline -> packages. Those that are not installed are left out.
DISCIPLINES = {
    "mathematics": ("sympy", "mpmath", "networkx"),
    "numerics": ("numpy", "scipy"),
    "learning": ("torch", "sklearn", "transformers", "deepspeed", "megatron", "accelerate"),
    "graphics": ("matplotlib", "PIL", "fontTools"),
    "data": ("pandas", "narwhals", "sqlalchemy", "datasets", "pyarrow"),
    "language": ("nltk", "lm_eval", "evaluate", "tokenizers"),
}
DOCSTRING_CHARS = 200  #: a shorter one says hardly more than a name
_QUOTED = re.compile(r'("""|\'\'\')(.*?)(?<!\\)\1', re.S)
_TESTS = {"tests", "test", "testing"}


def installed() -> list[str]:
    """The packages of DISCIPLINES that are installed here."""
    return [package for packages in DISCIPLINES.values() for package in packages if _root(package)]


def package_documents(package: str) -> Iterator[dict[str, str]]:
    """The docstrings of a package's modules, in order of file names: id, domain, source, text."""
    root = _root(package)
    if root is None:
        raise ConfigError(f"package:{package} is not installed: install it, or name other packages")
    domain = next((name for name, packages in DISCIPLINES.items() if package in packages), package)
    for file in sorted(root.rglob("*.py")):
        if _TESTS.isdisjoint(file.relative_to(root).parts):
            for line, text in _docstrings(file.read_text(encoding="utf-8", errors="replace")):
                place = f"{package}/{file.relative_to(root).as_posix()}:{line}"
                yield {"id": place, "domain": domain, "source": package, "text": text}


def _root(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    folders = spec and spec.submodule_search_locations
    return Path(list(folders)[0]) if folders else None


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of triple-quoted strings that begin a line or are an argument: no templates."""
    for match in _QUOTED.finditer(source):
        before = source[source.rfind("\n", 0, match.start()) + 1 : match.start()].rstrip("rRuU ")
        if len(match[2]) >= DOCSTRING_CHARS and (not before.strip() or before[-1] in "(,"):
            yield source.count("\n", 0, match.start()) + 1, inspect.cleandoc(match[2])
