"""Three cell magics with which a participant writes training scripts of their own.

    %%write my/train.py                     the cell's text becomes the file; -a: it follows what is
                                            there, and replaces what it wrote when it ran before
    %%change my/train.py my/train_ddp.py    the second file is the first with the changes that the
                                            cell shows
    %%fill my/train_ddp.py 03.a             the cell's lines fill a gap that another cell left

Changes are written as `diff` writes them: lines to remove begin with -, new ones with +, lines that
stay with a space, and @@ stands between places. A line `# gap 03.a: what it is for` leaves a gap
(see `gaps`); where it is removed, all goes that was written there. A file edited by hand is never
overwritten: it is kept under a new name. Where the first file is missing, or a change does not fit
it, workshop/your_own has a copy. A path with a space needs quotes, unless the space is in a {name}.
"""

from __future__ import annotations

import difflib
import re
import shlex
from pathlib import Path

from IPython.core.magic import no_var_expand

from aiscale.lesson import gaps
from aiscale.lesson.notebook import LessonError, notebooks
from aiscale.lesson.workbooks import find, workshop
from aiscale.lesson.written import places, write

_TARGET = re.compile(r"%%(?:write|change) .*?([\w.]+)\n")


def changed(text: str, changes: str) -> str:
    """`text` with `changes`, both with each gap as one line.

    Raises LessonError if a place is not there exactly once, unless it is changed already.
    """
    for place in re.split(r"^@@.*\n?", changes, flags=re.MULTILINE):
        # a blank line may have lost its space
        lines = [line if line.strip() else " " for line in place.splitlines()]
        if wrong := [line for line in lines if line[0] not in " +-"]:
            raise LessonError(f"begin this line with a space, + or -: {wrong[0]}")
        old = "".join(f"{line[1:]}\n" for line in lines if line[0] != "+")
        new = "".join(f"{line[1:]}\n" for line in lines if line[0] != "-")
        text = _with_gaps_of(old, text)
        if text.count(old) == 1 and not (len(new) > len(old) and new in text):
            text = text.replace(old, new)
        elif new not in text:
            where = "nowhere" if old not in text else "more than once"
            raise LessonError(
                f"these lines stand {where} in the file; write them as they are there:\n{old}"
            )
    return text


def _with_gaps_of(old: str, text: str) -> str:
    """The text in which each gap of `old` is one: a copy from workshop/your_own has no marks."""
    known = gaps.gaps_in(text)
    for line in old.splitlines():
        for id in gaps.gaps_in(line):
            if id not in known:
                text = gaps.with_gap(text, line, find(id)[1].lines)
    return text


def provide(path: str | Path) -> None:
    """Copy from workshop/your_own what is missing of a file and its helpers."""
    path, ours = Path(path), workshop() / "your_own"
    if not (ours / path.name).exists():
        return
    if not path.exists():
        print(f"{path.name} was missing: a copy from workshop/your_own")
    path.parent.mkdir(parents=True, exist_ok=True)
    for each in ours.iterdir():
        # later steps are still to be written
        is_later = each.name.startswith("train_") and each.name != path.name
        copy = path.parent / each.name
        if each.is_file() and not is_later and not copy.exists():
            write(copy, each.read_text())  # a later lesson may write it anew


def catch_up(folder: str | Path, lesson: str) -> None:
    """Put the scripts in a folder where a lesson ends, such as "03"; what you wrote is kept."""
    for notebook in notebooks():
        if notebook.is_appendix or notebook.name[:2] > lesson[:2]:
            continue
        for cell in notebook.cells:
            target = _TARGET.match(cell.source) if cell.cell_type == "code" else None
            ours = workshop() / "your_own" / target[1] if target else None
            if ours and ours.exists():
                write(Path(folder, ours.name), ours.read_text())
    provide(Path(folder, "model.py"))  # and its helpers
    print(f"{folder} has the scripts as they are at the end of lesson {lesson[:2]}")


def _change(first: Path, second: Path, cell: str) -> str:
    """Write the second file; returns what was done."""
    text, fillings = gaps.collapsed(first.read_text())
    ours = workshop() / "your_own" / first.name
    note = ""
    try:
        short = changed(text, cell)
    except LessonError as error:
        if first == second or not ours.exists():
            raise
        # The learner's own style does not go on from here; it stays in the first file.
        text, fillings = ours.read_text(), {}
        short = changed(text, cell)
        line = str(error).splitlines()[1].strip()
        note = f"; it goes on from the kit's {first.name}, for yours has no single line `{line}`"
    short = short.replace(first.name, second.name)  # as its docstring calls it
    # A copy from workshop/your_own has the kit's lines there, without marks.
    for id in gaps.gaps_in("".join(re.findall(r"^ (.*\n)", f"{cell}\n", flags=re.MULTILINE))):
        if id not in gaps.gaps_in(text):
            fillings[id] = gaps.Filling(find(id)[1].lines)
    if first != second:
        if empty := [id for id in gaps.gaps_in(text) if id not in fillings]:
            fillings |= {id: gaps.Filling(find(id)[1].lines, by_kit=True) for id in empty}
            note += f"; gap {', '.join(empty)} was empty: the kit's lines stand there"
        _, before = gaps.collapsed(second.read_text()) if second.exists() else ("", {})
        fillings = before | fillings
    new = gaps.expanded(short, fillings)
    diff = [line[0] for line in difflib.unified_diff(text.splitlines(), short.splitlines(), n=0)][
        2:
    ]
    return f"{_write(second, new)}, {diff.count('+')} of them new; {diff.count('-')} gone{note}"


def _write(path: Path, text: str) -> str:
    for id in gaps.gaps_in(text):
        if find(id)[1].script == path.name:  # others have a copy
            places[id] = path.absolute()
    return write(path, text)


def load_ipython_extension(shell) -> None:
    """Register the magics. {names} in their first lines are filled in."""

    def words_of(line: str) -> list[str]:
        # Before names are filled in: a folder's name may have spaces.
        return [shell.var_expand(word) for word in shlex.split(line)]

    @no_var_expand
    def write_cell(line: str, cell: str) -> None:
        *append, path = words_of(line)
        if append not in ([], ["-a"]):
            raise LessonError(f"%%write {line}: it writes one file; quote a path that has a space")
        text = cell.rstrip("\n") + "\n"
        ends = ""
        before, fillings = "", {}
        if Path(path).exists():
            before, fillings = gaps.collapsed(Path(path).read_text())
        if append and text in before:
            text = before  # a cell that is run again changes nothing
        elif append:
            # where this cell began when it ran before
            above, *below = before.split(f"\n\n\n{text.splitlines()[0]}\n")
            text = f"{above.rstrip()}\n\n\n{text}"
            ends = "; it ends here now: run the cells that write the rest" if below else ""
        print(_write(Path(path), gaps.expanded(text, fillings)) + ends)

    @no_var_expand
    def change_cell(line: str, cell: str) -> None:
        paths = words_of(line)
        if len(paths) > 2:
            raise LessonError(
                f"%%change {line}: it takes two files at most; quote a path that has a space"
            )
        provide(paths[0])
        print(_change(Path(paths[0]), Path(paths[-1]), cell))

    @no_var_expand
    def fill_cell(line: str, cell: str) -> None:
        words = words_of(line)
        if len(words) != 2:
            raise LessonError(f"%%fill {line}: it takes a file and a gap, such as 03.a")
        path, id = Path(words[0]), words[1]
        text, fillings = gaps.collapsed(path.read_text()) if path.exists() else ("", {})
        if id not in gaps.gaps_in(text):
            raise LessonError(f"{path.name} has no gap {id}: run the cell that writes it first")
        places[id] = path.absolute()
        if lines := gaps.written_in(cell, id):
            fillings[id] = gaps.Filling(lines)
            print(write(path, gaps.expanded(text, fillings)))
        else:
            print(f"{id}: write your lines in this cell, and run it again")

    shell.register_magic_function(write_cell, "cell", "write")
    shell.register_magic_function(change_cell, "cell", "change")
    shell.register_magic_function(fill_cell, "cell", "fill")
