"""Writes src/aiscale/train/X.diff: the changes that make the trainer X of a lesson's script.

    python tools/trainer_diffs.py

Run it after you have edited a trainer or a script of workshop/your_own. The changes are written as
`%%change` takes them: places between @@, each with as many lines that stay as tell it from all
others.
"""

from __future__ import annotations

import difflib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRAINERS = ROOT / "src/aiscale/train"
#: trainer -> the script of workshop/your_own that it grows from
ORIGINS = {
    "serial": "train.py",
    "ddp": "train_ddp.py",
    "fsdp": "train_fsdp.py",
    "zero": "train_zero.py",
    "tp_pp": "train_tp_pp.py",
    "megatron": "train_megatron.py",
    "radius": "train_radius.py",
}


def main() -> None:
    for trainer, origin in ORIGINS.items():
        grown = TRAINERS / f"{trainer}.py"
        if grown.exists():
            text = (ROOT / "workshop/your_own" / origin).read_text()
            changes = differences(text, grown.read_text())
            grown.with_suffix(".diff").write_text(changes)
            print(f"{trainer}: +{added(changes)} -{added(changes, '-')}")


def differences(old: str, new: str) -> str:
    """Changes that make `new` of `old`, for aiscale.lesson.scripts.changed."""
    before, after = old.splitlines(), new.splitlines()
    places = []
    for kind, a, b, c, d in difflib.SequenceMatcher(
        None, before, after, autojunk=False
    ).get_opcodes():
        if kind != "equal":
            places.append([a, b, c, d])
    return "@@\n".join(_place(before, after, place) for place in places)


def _place(before: list[str], after: list[str], place: list[int]) -> str:
    a, b, c, d = place
    above = 0
    while not _stands_once(before, before[a - above : b]) or _is_there(
        before, before[a - above : a] + after[c:d]
    ):
        above += 1
        if above > a:
            raise ValueError(f"no lines above tell this place from another: {before[a:b]}")
    stays = [f" {line}" for line in before[a - above : a]]
    lines = [*stays, *(f"-{line}" for line in before[a:b]), *(f"+{line}" for line in after[c:d])]
    return "".join(f"{line.rstrip()}\n" if line.strip() else "\n" for line in lines)


def _stands_once(lines: list[str], wanted: list[str]) -> bool:
    return bool(wanted) and _count(lines, wanted) == 1


def _is_there(lines: list[str], wanted: list[str]) -> bool:
    return bool(wanted) and _count(lines, wanted) > 0


def _count(lines: list[str], wanted: list[str]) -> int:
    starts = range(len(lines) - len(wanted) + 1)
    return sum(lines[start : start + len(wanted)] == wanted for start in starts)


def added(changes: str, sign: str = "+") -> int:
    return sum(line.startswith(sign) for line in changes.splitlines())


if __name__ == "__main__":
    main()
