"""Two cell magics with which a participant writes training scripts of their own.

    %%write my/train.py                     the cell's text becomes the file; -a: it follows what is
                                            there, and replaces what it wrote when it ran before
    %%change my/train.py my/train_ddp.py    the second file is the first with the changes that the
                                            cell shows

Changes are written as `diff` writes them: lines to remove begin with -, new ones with +, lines that
stay with a space, and @@ stands between places. A file edited by hand is never overwritten: it is
kept under a new name. Where the first file is missing, workshop/your_own has a copy. A path with a
space needs quotes, unless the space is in a {name}.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import re
import shlex
from pathlib import Path

from IPython.core.magic import no_var_expand

from aiscale.lesson.notebook import LessonError
from aiscale.lesson.workbooks import workshop


def changed(text: str, changes: str) -> str:
    """`text` with `changes`.

    Raises LessonError if a place is not there exactly once, unless it is changed already.
    """
    for place in re.split(r"^@@.*\n?", changes, flags=re.MULTILINE):
        # a blank line may have lost its space
        lines = [line if line.strip() else " " for line in place.splitlines()]
        if wrong := [line for line in lines if line[0] not in " +-"]:
            raise LessonError(f"begin this line with a space, + or -: {wrong[0]}")
        old = "".join(f"{line[1:]}\n" for line in lines if line[0] != "+")
        new = "".join(f"{line[1:]}\n" for line in lines if line[0] != "-")
        if text.count(old) == 1 and not (len(new) > len(old) and new in text):
            text = text.replace(old, new)
        elif new not in text:
            where = "nowhere" if old not in text else "more than once"
            raise LessonError(
                f"these lines stand {where} in the file; write them as they are there:\n{old}"
            )
    return text


def write(path: str | Path, text: str) -> str:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # digests of what was written here, to know what was edited since
    record = path.parent / ".written"
    digests = set(record.read_text().split()) if record.exists() else set()
    summary = f"{path.name}: {len(text.splitlines())} lines"
    if path.exists() and path.read_text() != text and _digest(path.read_text()) not in digests:
        numbers = (path.with_name(f"{path.stem}.{n}{path.suffix}") for n in itertools.count(1))
        path.rename(backup := next(name for name in numbers if not name.exists()))
        summary += f"; what you wrote there is now {backup.name}"
    path.write_text(text)
    record.write_text("\n".join(sorted(digests | {_digest(text)})))
    return summary


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def provide(path: str | Path) -> None:
    """Copy from workshop/your_own what is missing in the folder of `path`, if `path` itself is."""
    path, ours = Path(path), workshop() / "your_own"
    if path.exists() or not (ours / path.name).exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    missing = [
        each for each in ours.iterdir() if each.is_file() and not (path.parent / each.name).exists()
    ]
    for each in missing:
        # later steps are still to be written
        if not each.name.startswith("train_") or each.name == path.name:
            (path.parent / each.name).write_bytes(each.read_bytes())
    print(f"{path.name} was missing: a copy from workshop/your_own")


def load_ipython_extension(shell) -> None:
    """Register both magics. {names} in their first lines are filled in."""

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
        if append and text in (before := Path(path).read_text()):
            text = before  # a cell that is run again changes nothing
        elif append:
            # where this cell began when it ran before
            above, *below = before.split(f"\n\n\n{text.splitlines()[0]}\n")
            text = f"{above.rstrip()}\n\n\n{text}"
            ends = "; it ends here now: run the cells that write the rest" if below else ""
        print(write(path, text) + ends)

    @no_var_expand
    def change_cell(line: str, cell: str) -> None:
        paths = words_of(line)
        if len(paths) > 2:
            raise LessonError(
                f"%%change {line}: it takes two files at most; quote a path that has a space"
            )
        first, second = paths[0], paths[-1]
        provide(first)
        text = Path(first).read_text()
        # as its docstring calls it
        new = changed(text, cell).replace(Path(first).name, Path(second).name)
        lines = difflib.unified_diff(text.splitlines(), new.splitlines(), n=0)
        diff = [each[0] for each in lines][2:]
        print(f"{write(second, new)}, {diff.count('+')} of them new; {diff.count('-')} gone")

    shell.register_magic_function(write_cell, "cell", "write")
    shell.register_magic_function(change_cell, "cell", "change")
