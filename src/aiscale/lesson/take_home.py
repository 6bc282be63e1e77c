"""`aiscale take-home`: what a participant has written and run, in one zip file to download.

aiscale take-home        # aiscale-home.zip, beside notebooks/; then Download in JupyterLab
"""

from __future__ import annotations

import argparse
import zipfile
from collections.abc import Iterator
from pathlib import Path

from aiscale.errors import ConfigError

#: below the folder that holds notebooks/: scripts, guesses and grades, executed notebooks, answers
FOLDERS = (
    "my",
    "progress",
    "notebooks",
    "workshop/exercises",
    "workshop/puzzles",
    "workshop/clinic",
)
LARGEST_BYTES = 50 * 10**6  #: of a file: checkpoints that are larger stay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("aiscale-home.zip"),
        help="the file, below the folder that holds notebooks/ (default: aiscale-home.zip)",
    )


def run(args: argparse.Namespace) -> None:
    root = _root()
    out = root / args.out
    names = sorted(_mine(root))
    large = [name for name in names if (root / name).stat().st_size > LARGEST_BYTES]
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in names:
            if name not in large:
                packed.write(root / name, Path("aiscale") / name)
    for name in large:
        print(f"left out, over {LARGEST_BYTES // 10**6} MB: {name}")
    size = f"{len(names) - len(large)} files, {out.stat().st_size / 1e6:.1f} MB"
    print(f"{out}: {size}. In JupyterLab's list of files: right click, Download")


def _root() -> Path:
    """The folder that holds notebooks/, here or above."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "notebooks").is_dir():
            return folder
    raise ConfigError(f"{here} has no folder notebooks, here or above: cd to where yours is")


def _mine(root: Path) -> Iterator[Path]:
    """Files below `root`, without hidden ones, bytecode, and what links lead to."""
    for folder in FOLDERS:
        for path in (root / folder).rglob("*"):
            name = path.relative_to(root)
            hidden = any(part.startswith(".") or part == "__pycache__" for part in name.parts)
            if path.is_file() and not path.is_symlink() and not hidden:
                yield name
