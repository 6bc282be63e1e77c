"""Finds the newest checkpoint that is complete and undamaged, and names each that is skipped. One in another layout is
not skipped: `checkpoint.load` refuses it, because going back would lose steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

from aiscale.checkpoint import NOTE, CheckpointError, integrity, read_note
from aiscale.distributed import World, alike


def newest_good(folder: str | Path, world: World) -> Path | None:
    """The newest undamaged checkpoint below `folder`, or None if there are none. All ranks call it: each reads a share
    of the files. Raises CheckpointError if all are damaged."""
    names, unfinished = world.from_rank0(lambda: _newest_first(Path(folder)))
    folders = [Path(folder, name) for name in names]
    if unfinished:
        _say(world, f"{unfinished} was not finished: resuming from {names[0] if names else 'the start'}")
    for path, before in zip(folders, [*folders[1:], None], strict=False):
        wrong = world.from_rank0(lambda path=path: _unusable(path)) or _damage(path, world)
        if not wrong:
            return path
        if before is None:
            others = ", and no newer one can be used either" if len(folders) > 1 else ""
            refusal = f"{path} {wrong}{others}: nothing to resume from; start again without --resume, into another run "
            raise alike(CheckpointError(refusal + "(--set name=...)"))
        _say(world, f"{path} {wrong}: going back to {before.name}")
    return None


def _say(world: World, message: str) -> None:
    if world.is_main:
        print(f"aiscale: {message}", file=sys.stderr, flush=True)


def _newest_first(folder: Path) -> tuple[list[str], str]:
    """(names of the folders named like a checkpoint, newest first; a newer one that is unfinished, or "")"""
    names = sorted((path.name for path in folder.glob("step_*") if path.is_dir()), reverse=True)
    begun = max(folder.glob(".step_*.partial"), default=None)
    newer = begun and (not names or begun.name[1:] > names[0])
    return names, str(begun) if newer else ""


def _unusable(path: Path) -> str:
    """Why a checkpoint's note rules it out, to follow its name; empty if it does not."""
    if not (path / NOTE).exists():
        return f"is not whole (it has no {NOTE})"
    try:
        read_note(path)
    except CheckpointError as error:
        return f"is damaged ({str(error).removeprefix(f'{path} ').partition(': use')[0]})"
    return ""


def _damage(path: Path, world: World) -> str:
    def mine() -> str:
        note = read_note(path)
        return integrity.damage(path, note, list(note["files"])[world.rank :: world.size])

    wrong = next(filter(None, world.gather(world.together(mine))), "")
    return wrong and f"is damaged ({wrong})"
