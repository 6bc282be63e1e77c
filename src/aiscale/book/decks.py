"""The sources of decks: Markdown files in slides/, read and checked without building them.

decks(["03_ddp"])[0].notebooks     # -> {"03_ddp"}: whose figures it shows
list(problems(deck))               # -> [], or what keeps it from being built, apart from its expressions

title: Data parallelism            front matter; also subtitle, minutes, color (a strategy's)
large = recipe("22b")              a name for its expressions
---                                between slides
## Every rank holds everything     the title of a slide; `# ` makes a slide of one sentence
GPT-2 has {{ count(cost.parameter_count(recipe("gpt2").model)) }} parameters.
|||                                between two columns; with two of them, the first part stands above
![what it shows](plots:field_map())               a figure of `aiscale.plots`
![what it shows](notebook:03_ddp#c20c3268)        the figure of a cell of an executed notebook
Source: predicted by `cost`        under the figure: measured here, predicted, published or drawn
Note: what the speaker says, until the end of the slide
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aiscale import plots
from aiscale.book.core import is_optional
from aiscale.book.notebook import BookError, choose, find_root, notebooks

KINDS = ("measured here", "predicted", "published", "drawn")  #: of what a source says
NUMBER = re.compile(r"\{\{(.+?)\}\}", re.S)
FIGURE = re.compile(r"^!\[([^\]]+)\]\((plots|notebook):(.*?)\)$(?=\n\s*\n|\n*\Z|\n\|\|\||\nSource:)", re.M | re.S)
#: A number that belongs to the package: with a unit, outside expressions and code.
_WRITTEN_OUT = re.compile(
    r"\d[\d.,]*[  ]?(?:[KMGT]i?B(?:/s)?\b|%|TFLOP|PFLOP|µs\b|ms\b|GB/s|[MB] parameters|(?:million|billion)\b)"
)


@dataclass(frozen=True)
class Deck:
    name: str
    about: dict[str, str]  #: title, subtitle, minutes, color
    texts: tuple[str, ...]  #: of the slides
    names: dict[str, str] = field(default_factory=dict)  #: expressions of its own, by name

    @property
    def notebooks(self) -> set[str]:
        """The names of the notebooks whose figures it shows."""
        return {
            what.partition("#")[0] for text in self.texts for _, kind, what in FIGURE.findall(text) if kind != "plots"
        }

    @property
    def color(self) -> str:
        return plots.STRATEGY_COLORS[self.about.get("color", "serial")]


def decks(names: Sequence[str] = (), root: str | Path | None = None) -> list[Deck]:
    """The decks of a folder, or those that `names` select by name, number or path."""
    root = Path(root) if root else find_root().parent / "slides"
    return [_read(path) for path in choose("deck", names, sorted(root.glob("*.md")), root)]


def _read(path: Path) -> Deck:
    try:
        head, *texts = re.split(r"^---$", path.read_text(encoding="utf-8"), flags=re.M)
    except (OSError, UnicodeDecodeError) as error:
        raise BookError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from None
    about = dict(re.findall(r"^(\w+): *(.+)$", head, re.M))
    if not {"title", "minutes"} <= about.keys() or not texts:
        raise BookError(f"{path} is not a deck: it begins with `title:`, `minutes:` and a line ---, then its slides")
    names = dict(re.findall(r"^(\w+) = (.+)$", head, re.M))
    return Deck(path.stem, about, tuple(text.strip() for text in texts), names)


def problems(deck: Deck) -> Iterator[str]:
    """What keeps a deck from being built, apart from its expressions: without running a notebook."""
    sources = {name: {cell["id"]: cell for cell in notebooks([name])[0].content.cells} for name in deck.notebooks}
    for number, text in enumerate(deck.texts, 2):
        where, body = f"slide {number}", text.partition("\nNote:")[0]
        if not body.startswith(("# ", "## ")):
            yield f"{where} has no title: begin it with ## "
        prose = re.sub(r"^Source:.*$", "", body, flags=re.M)
        sourced = re.search(rf"^Source: ({'|'.join(KINDS)})", body, re.M)
        if (FIGURE.search(prose) or NUMBER.search(prose)) and not sourced:
            yield f"{where} has a figure or a number, but no line `Source: ` with {', '.join(KINDS)}"
        plain = FIGURE.sub("", re.sub(r"^```.*?^```", "", NUMBER.sub("", body), flags=re.M | re.S))
        if written := _WRITTEN_OUT.search(re.sub(r"`[^`\n]*`", "", plain)):
            yield f"{where} says {written[0]!r} in so many words: write {{{{ an expression }}}} that gives it"
        for _, kind, what in FIGURE.findall(body):
            name, _, cell = what.partition("#")
            if kind == "notebook" and (cell not in sources[name] or is_optional(sources[name][cell])):
                yield f"{where} shows cell {cell!r} of {name}, whose core path has no such cell"
            elif kind == "notebook" and not re.search(r"plots\.|plt\.", sources[name][cell].source):
                yield f"{where} shows cell {cell!r} of {name}, which draws no figure"
        if "![" in FIGURE.sub("", body):
            yield f"{where} has a figure that is neither plots:CALL() nor notebook:NAME#CELL on a line of its own"
