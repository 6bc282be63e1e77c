"""What a course has beside its lessons, for the gallery's first page: exercises, clinic, puzzles, decks, sheets.

    for shelf in shelves(Path("workshop"), Path("build"), Path("build/gallery")):
        print(shelf.heading, [(item.title, item.href) for item in shelf.items])

What is there is shown, and a shelf without anything is not. Notebooks and Markdown become pages, HTML files
that load nothing are copied, and decks are linked where `make slides` has put them.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from aiscale.book.notebook import read


@dataclass(frozen=True)
class Item:
    title: str
    about: str
    href: str
    lesson: str = ""  #: the number of the lesson it belongs to
    more: tuple[tuple[str, str], ...] = ()  #: (label, href) of its other forms


@dataclass(frozen=True)
class Shelf:
    name: str
    heading: str
    about: str
    items: tuple[Item, ...]


#: Of each shelf, in their order, its heading and what it says of itself.
_SHELVES = {
    "exercises": (
        "Exercises",
        "In JupyterLab, from workshop/exercises: each check says what is wrong; hints come before solutions.",
    ),
    "clinic": (
        "Bug clinic",
        "Programs with one fault each, in workshop/clinic: say what is wrong, mend it, and let the grader run it.",
    ),
    "puzzles": (
        "Puzzles",
        "In JupyterLab, from workshop/puzzles: move data between simulated ranks within a time and a memory.",
    ),
    "decks": ("Decks", "Arrow keys turn the slides, S opens the speaker's view."),
    "sheets": ("Sheets", "To print, to look things up, and to see what you knew before and after."),
    "instructor": ("For the instructor", "What to say, show and let them do."),
}
_PAGES = re.compile(r"glossary\.md|(blocks|clinic)/\w+\.md|(exercises|puzzles)/\w+\.ipynb")
COPIED = ("cheat_sheet.html", "quiz.html")
#: Writes a page (its title, where its source lies, its cells of Markdown or code) and returns its file name.
Page = Callable[[str, Path, list[tuple[str, str]]], str]


def shelves(workshop: Path, out: Path, folder: Path, page: Page) -> list[Shelf]:
    """The shelves that have something on them; `out` is where decks are, `folder` where the gallery is."""
    clinic = workshop / "clinic"
    guide = [workshop / "README.md", *sorted((workshop / "blocks").glob("*.md"))]
    items = {
        "exercises": _notebooks(workshop / "exercises", page),
        "clinic": _texts([clinic / "README.md", *sorted(clinic.glob("[0-9][0-9]_*.md"))], page),
        "puzzles": _notebooks(workshop / "puzzles", page),
        "decks": _decks(out, folder),
        "sheets": _sheets(workshop, folder, page),
        "instructor": _texts(guide, page),
    }
    made = [Shelf(name, *words, tuple(items[name])) for name, words in _SHELVES.items()]
    return [shelf for shelf in made if shelf.items]


def page_name(path: Path, workshop: Path) -> str:
    """The gallery's page of a file; empty if it has none."""
    path, workshop = path.resolve(), workshop.resolve()
    if workshop.parent / "notebooks" in path.parents and path.suffix == ".ipynb":
        return f"{path.stem}.html"
    if workshop not in path.parents or not path.exists():
        return ""
    place = str(path.relative_to(workshop))
    if place in COPIED:
        return place
    if place == "README.md":
        return "instructor.html"
    return str(Path(place).with_suffix(".html")).replace("/", "_") if _PAGES.fullmatch(place) else ""


def _notebooks(folder: Path, page: Page) -> Iterator[Item]:
    for path in sorted(folder.glob("*.ipynb")):
        cells = [(cell.cell_type, cell.source) for cell in read(path).cells if cell.cell_type != "raw"]
        title, about = _opening(next((source for kind, source in cells if kind == "markdown"), ""), path)
        yield Item(title, about, page(title, path, cells), _lesson(path))


def _decks(out: Path, folder: Path) -> Iterator[Item]:
    for path in sorted((out / "slides").glob("*.html")):
        if path.stem == "index":  # of an older version
            continue
        href, pdf = os.path.relpath(path, folder), path.with_suffix(".pdf")
        more = (("PDF", os.path.relpath(pdf, folder)),) if pdf.exists() else ()
        yield Item(_title_of(path), "", href, _lesson(path), more)


def _sheets(workshop: Path, folder: Path, page: Page) -> Iterator[Item]:
    yield from _texts([workshop / "glossary.md"], page)
    for name in COPIED:
        if (path := workshop / name).exists():
            text = path.read_text(encoding="utf-8")
            about = re.search(r'<meta name="description" content="(.*?)"', text)
            (folder / name).write_text(text, encoding="utf-8")
            yield Item(_title_of(path), html.unescape(about[1]) if about else "", name)


def _texts(paths: list[Path], page: Page) -> Iterator[Item]:
    for path in paths:
        if path.exists():
            text = path.read_text(encoding="utf-8")
            title, about = _opening(text, path)
            yield Item(title, about, page(title, path, [("markdown", text)]), _lesson(path))


def _lesson(path: Path) -> str:
    return path.stem[:2] if re.match(r"\d\d(_|$)", path.stem) else ""


def _opening(text: str, path: Path) -> tuple[str, str]:
    """(the heading, the first sentence below it) of a text in Markdown."""
    heading = re.search(r"^#+ +(.+)$", text, re.M)
    below = text[heading.end() :] if heading else text
    first = next((part for part in re.split(r"\n\s*\n", below) if re.match(r"\s*[^\s#|!<`-]", part)), "")
    first = re.sub(r"^> ?", "", first.strip(), flags=re.M)
    plain = " ".join(re.sub(r"\[(.*?)\]\(.*?\)|[*`]", r"\1", first).split())
    return heading[1] if heading else path.stem, re.split(r"(?<=[.?!]) (?=[A-Z])|:$", plain)[0]


def _title_of(path: Path) -> str:
    found = re.search(r"<title>(.*?)</title>", path.read_text(encoding="utf-8"), re.S)
    title = html.unescape(found[1]).strip().removeprefix("aiscale: ") if found else path.stem
    return title[:1].upper() + title[1:]
