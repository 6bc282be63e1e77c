"""The checkpoint that a run goes on from: its newest one that is whole, undamaged and its own.

    path = newest_good("runs/laptop/checkpoints", world, run_id=records.run_id)

Each that is passed over is told in one line. The id of a run is in its run.json and in its checkpoints: a copy of the
whole folder goes on like the original. One of this run in another layout is not passed over but refused by
`checkpoint.load`: going back would cost the steps since, and naming its strategy costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from aiscale.checkpoint import NOTE, CheckpointError, integrity, of_another_run, read_note
from aiscale.distributed import World, alike


def newest_good(
    folder: str | Path, world: World, say: Callable[[str], None] = print, run_id: str | None = None
) -> Path | None:
    """The newest checkpoint below `folder` whose files are what was written, or None where there is none at all.

    All ranks call it: each reads a share of the files. `say` is told, on rank 0, of each that is passed over; with
    `run_id` those of other runs are, unless they are older than ids. Raises CheckpointError where none is left.
    """
    found, unfinished = world.from_rank0(lambda: _newest_first(Path(folder)))
    if unfinished and world.is_main:
        say(f"{unfinished} was not finished: going on from {found[0].name if found else 'the start'}")
    for path, before in zip(found, [*found[1:], None], strict=False):  # none at all: a run that died before its first
        wrong = world.from_rank0(lambda path=path: _unusable(path, run_id)) or _damage(path, world)
        if not wrong:
            return path
        if before is None:
            others = ", and no newer one can be used either" if len(found) > 1 else ""
            refusal = f"{path} {wrong}{others}: nothing to resume from; start again without --resume, into another run "
            raise alike(CheckpointError(refusal + "(--set name=...)"))
        if world.is_main:
            say(f"{path} {wrong}: going back to {before.name}")
    return None


def _newest_first(folder: Path) -> tuple[list[Path], Path | None]:
    """(folders with a checkpoint's name, one newer than these that a job was writing when it ended)"""
    found = sorted((path for path in folder.glob("step_*") if path.is_dir()), reverse=True)
    begun = max(folder.glob(".step_*.partial"), default=None)
    return found, begun if begun and (not found or begun.name[1:] > found[0].name) else None


def _unusable(path: Path, run_id: str | None) -> str:
    """What stands against a checkpoint by its note alone; empty if nothing does."""
    if not (path / NOTE).exists():
        return f"is not whole (it has no {NOTE})"
    try:
        read_note(path)
    except CheckpointError as error:
        return f"is damaged ({str(error).removeprefix(f'{path} ').partition(': use')[0]})"
    theirs = of_another_run(path, run_id)
    return f"is of another run ({theirs}, not {run_id} as in run.json)" if theirs else ""


def _damage(path: Path, world: World) -> str:
    def mine() -> str:
        note = read_note(path)
        return integrity.damage(path, note, list(note["files"])[world.rank :: world.size])

    wrong = next(filter(None, world.gather(world.together(mine))), "")
    return wrong and f"is damaged ({wrong})"
