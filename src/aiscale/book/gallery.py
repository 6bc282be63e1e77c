"""The gallery: build/gallery/index.html with a card per notebook, and each executed notebook as a page beside it.

    build_gallery(out="build")    # -> Path("build/gallery/index.html")

Everything is readable from a folder on a disk, without a network: figures lie in files beside the index, pages hold
theirs. A card's figure is that of the cell tagged `cover`, else the first of the notebook.
"""

from __future__ import annotations

import base64
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from markupsafe import Markup
from nbformat import NotebookNode

from aiscale.book.notebook import BookError, Notebook, notebooks, read, tags
from aiscale.book.results import Ledger, Result


@dataclass(frozen=True)
class Card:
    """What the gallery says of a notebook."""

    notebook: Notebook
    result: Result | None  #: None: not run yet
    figure: str  #: a file beside the index, "" where the notebook drew nothing

    @property
    def state(self) -> str:
        return self.result.state if self.result else "not run"


def build_gallery(root: str | Path | None = None, out: str | Path = "build") -> Path:
    """Write the gallery of the notebooks in `root` from their executed copies in OUT/notebooks; returns its index."""
    from aiscale.book.page import environment, render, style  # imports nbconvert, which takes a second

    executed, folder = Path(out) / "notebooks", Path(out) / "gallery"
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    found, results = notebooks(root=root), Ledger(executed).load()
    cards = []
    for i, notebook in enumerate(found):
        copy = executed / f"{notebook.name}.ipynb"
        result = results.get(notebook.name) if copy.exists() else None
        content = read(copy) if result else notebook.content
        neighbours = found[i - 1] if i else None, found[i + 1] if i + 1 < len(found) else None
        _write(folder / f"{notebook.name}.html", render(notebook, content, result, *neighbours))
        cards.append(Card(notebook, result, _save_figure(content, folder / "figures" / f"{notebook.name}.png")))
    text = environment().get_template("index.html.j2").render(cards=cards, css=Markup(style()), **_facts(cards))
    _write(folder / "index.html", text, allowed="img src=figures/")
    return folder / "index.html"


def _write(path: Path, text: str, allowed: str | None = None) -> None:
    """Write a page after making sure that it shows without a network."""
    from aiscale.book.page import loads

    outside = [load for load in loads(text) if allowed is None or not load.startswith(allowed)]
    if outside:
        raise BookError(f"{path.stem} would load {outside[0]}: take it out of the notebook, which is read offline")
    path.write_text(text, encoding="utf-8")


def _save_figure(content: NotebookNode, path: Path) -> str:
    path.unlink(missing_ok=True)
    cells = [cell for cell in content.cells if cell.cell_type == "code"]
    chosen = [cell for cell in cells if "cover" in tags(cell)]
    image = next((image for cell in [*chosen, *cells] for image in _images(cell)), None)
    if image is None:
        return ""
    path.write_bytes(base64.b64decode(image))
    return f"{path.parent.name}/{path.name}"


def _images(cell: NotebookNode) -> Iterator[str]:
    for output in cell.get("outputs", []):
        if "image/png" in output.get("data", {}):
            yield output.data["image/png"]


def _facts(cards: list[Card]) -> dict[str, object]:
    """What the head of the gallery says about all notebooks together."""
    run = [card.result for card in cards if card.result]
    return {
        "passed": sum(result.state == "passed" for result in run),
        "failed": sum(result.state == "failed" for result in run),
        "seconds": sum(result.seconds for result in run),
        "minutes": sum(card.notebook.header.minutes for card in cards),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": f"Python {sys.version.split()[0]}, torch {version('torch')}",
        "built": time.strftime("%Y-%m-%d %H:%M"),
    }
