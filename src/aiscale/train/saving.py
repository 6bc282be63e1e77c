"""Saving while training goes on, and the checkpoint to go on from. Training waits for a copy, a thread writes it.

    with Saver(engine, path / "checkpoints", keep=2, background=True) as saver:
        saver.save(step, val_loss)      # returns when the state has been copied
        if world.any(saver.failed):     # between steps: a write that failed ends the run on all ranks
            saver.finish()
        saver.save(step, val_loss, wait=True)

All that `checkpoint` promises holds: what is not whole has no name of a checkpoint, the one before stays until then.
One checkpoint is written at a time; who asks for the next one waits for it. On a node whose memory has no room for a
copy of the rank's states, loop.async_checkpoint=false writes at once.

    path = newest_good("runs/laptop/checkpoints", world, run_id=records.run_id)

A run goes on from its newest checkpoint that is whole, undamaged and its own; each that is passed over is named in one
line. The id of a run is in its run.json and in its checkpoints: a copy of the whole folder goes on like the original.
One of this run in another layout is not passed over but refused by `checkpoint.load`: going back would cost the steps
since, and naming its strategy costs nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from aiscale import checkpoint
from aiscale.checkpoint import NOTE, CheckpointError, integrity, of_another_run, read_note
from aiscale.checkpoint.staging import Staging
from aiscale.distributed import World, alike


class Saver:
    """Writes an engine's checkpoints into a folder. All ranks make one, and call each method together."""

    def __init__(
        self,
        engine: checkpoint.Saveable,
        folder: Path,
        *,
        keep: int,
        background: bool,
        note: str | Path | None = None,
        run_id: str | None = None,
    ) -> None:
        self.engine, self.folder, self.background, self.note = engine, folder, background, note
        self._facts = {"keep": keep, "run_id": run_id}
        self._writing: _Writing | None = None
        self._apart: World | None = None
        self._staging = Staging()
        self._closing = ExitStack()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace) -> None:
        """Wait for what is being written, unless the run is being broken off. An error of the run hides one of it."""
        if kind is not None and not issubclass(kind, Exception):
            self._closing.pop_all()  # broken off: a thread may still talk there
            return
        with self._closing, suppress(*[Exception] if error else []):
            self.finish()

    @property
    def failed(self) -> bool:
        """Whether what was being written has failed on this rank; `finish` says why."""
        return self._writing is not None and self._writing.error is not None

    @property
    def done(self) -> bool:
        """Whether nothing is being written on this rank."""
        return self._writing is None or not self._writing.is_alive()

    def save(self, step: int, val_loss: float | None, *, wait: bool = False) -> None:
        """Keep the state after `step` steps; with `wait` it is on the disk when this returns."""
        self.finish()
        if self._apart is None:
            # Also for a write that is waited for: ranks may wait for each other's disks longer than the watchdog lets
            # them wait for a collective, until the half hour of this group is over.
            self._apart = self._closing.enter_context(self.engine.world.apart())
            self._closing.enter_context(checkpoint.quiet())  # here: a thread cannot do it without others noticing
        background = self.background and not wait
        facts = {**self._facts, "step": step, "val_loss": val_loss, "staging": self._staging if background else None}
        write = checkpoint.prepare(self.engine, self.folder, **facts)
        if background:
            self._writing = _Writing(lambda: self._note(write(self._apart)))
        else:
            self._note(write(self._apart))

    def note_stop(self) -> None:
        """Say in that file that the run was told to stop, and has."""
        if self.note and self.engine.world.is_main:
            with open(self.note, "a") as file:
                file.write("stopped\n")

    def _note(self, written: Path) -> None:
        """Say in the file that was asked for which checkpoint is whole."""
        if self.note and self.engine.world.is_main:
            Path(self.note).write_text(f"{written}\n")

    def finish(self) -> None:
        """Wait for what is being written; raises what it failed with, alike on all ranks."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.join()
            if writing.error is not None:
                raise writing.error


class Clock:
    """When the next checkpoint is due by the time that has passed; 0 minutes: never."""

    def __init__(self, minutes: float) -> None:
        self.seconds = 60 * minutes
        self.begin()

    def begin(self) -> None:
        self._began = time.monotonic()

    def has_come(self, world: World) -> bool:
        """Alike on all ranks: rank 0's clock counts."""
        return bool(self.seconds) and world.any(world.is_main and time.monotonic() - self._began >= self.seconds)


class _Writing(threading.Thread):
    """One checkpoint on its way to the disk."""

    def __init__(self, write) -> None:
        super().__init__(name="aiscale checkpoint", daemon=True)  # a rank that is broken off does not wait for it
        self.error: BaseException | None = None
        self._write = write
        self.start()

    def run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self.error = error
        finally:
            del self._write  # with the state that it holds


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
