"""Saves checkpoints while training goes on, and finds the checkpoint to resume from.

    with Saver(engine, path / "checkpoints", run_id=records.run_id) as saver:
        saver.save(step)                # returns when the state has been copied; a thread writes it
        if world.any(saver.failed):     # between steps: a failed write ends the run on all ranks
            saver.finish()
        saver.save(step, wait=True)

One checkpoint is written at a time: the next `save` waits for it. If a node has no memory for a copy of its ranks'
states, set loop.async_checkpoint=false.

    path = newest_good("runs/laptop/checkpoints", world, run_id=records.run_id)

A run resumes from its newest checkpoint that is complete, undamaged and its own; one line names each that is skipped.
The id of a run is in run.json and in its checkpoints, so a copy of the whole folder resumes like the original. A
checkpoint of this run in another layout is not skipped: `checkpoint.load` refuses it, because going back would lose
steps, and changing the strategy loses nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from aiscale import checkpoint
from aiscale.checkpoint import NOTE, CheckpointError, integrity, read_note
from aiscale.checkpoint.staging import Staging
from aiscale.checkpoint.store import of_another_run, quiet
from aiscale.distributed import World, alike
from aiscale.parallel import Engine


class Saver:
    """Writes an engine's checkpoints into a folder. All ranks make one, and call each method together."""

    def __init__(
        self, engine: Engine, folder: Path, *, run_id: str | None = None, note: str | Path | None = None
    ) -> None:
        self.engine, self.folder, self.note = engine, folder, note
        self._facts = {"keep": engine.run.loop.keep_checkpoints, "run_id": run_id}
        self._writing: _Writing | None = None
        self._apart: World | None = None
        self._staging = Staging()
        self._closing = ExitStack()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace) -> None:
        """Wait for the write, unless the run was interrupted. An error of the run hides the write's."""
        if kind is not None and not issubclass(kind, Exception):
            self._closing.pop_all()  # interrupted: the thread may still use the group
            return
        with self._closing, suppress(*[Exception] if error else []):
            self.finish()

    @property
    def failed(self) -> bool:
        """Whether the write has failed on this rank; `finish` raises the error."""
        return self._writing is not None and self._writing.error is not None

    def save(self, step: int, *, wait: bool = False) -> None:
        """Save the state after `step` steps; with `wait` it is on the disk when this returns."""
        self.finish()
        if self._apart is None:
            # For a write with `wait`, too: ranks may wait for each other's disks longer than the watchdog allows for a
            # collective. This group's timeout is half an hour.
            self._apart = self._closing.enter_context(self.engine.world.apart())
            self._closing.enter_context(quiet())  # here, because warning filters are not thread-safe
        background = self.engine.run.loop.async_checkpoint and not wait
        facts = {**self._facts, "step": step, "staging": self._staging if background else None}
        write = checkpoint.prepare(self.engine, self.folder, **facts)
        if background:
            self._writing = _Writing(lambda: self._note(write(self._apart)))
        else:
            self._note(write(self._apart))

    def note_stop(self) -> None:
        """Append `stopped` to that file: the run was told to stop, and has."""
        if self.note and self.engine.world.is_main:
            with open(self.note, "a") as file:
                file.write("stopped\n")

    def _note(self, written: Path) -> None:
        """Write the path of the completed checkpoint to `note_saved`."""
        if self.note and self.engine.world.is_main:
            Path(self.note).write_text(f"{written}\n")

    def finish(self) -> None:
        """Wait for the write; raises its error, on all ranks alike."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.join()
            if writing.error is not None:
                raise writing.error


class _Writing(threading.Thread):
    """A thread that writes one checkpoint."""

    def __init__(self, write) -> None:
        super().__init__(name="aiscale checkpoint", daemon=True)  # an interrupted rank does not wait for it
        self.error: BaseException | None = None
        self._write = write
        self.start()

    def run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self.error = error
        finally:
            del self._write  # frees the state


def writing() -> bool:
    """Whether a thread of this process writes a checkpoint."""
    return any(isinstance(thread, _Writing) for thread in threading.enumerate())


def newest_good(
    folder: str | Path, world: World, say: Callable[[str], None] = print, run_id: str | None = None
) -> Path | None:
    """The newest undamaged checkpoint below `folder`, or None if there are none. All ranks call it: each reads a share
    of the files. On rank 0 `say` gets a line for each one that is skipped; with `run_id` those of other runs are,
    except ones without an id. Raises CheckpointError if all are skipped."""
    folders, unfinished = world.from_rank0(lambda: _newest_first(Path(folder)))
    if unfinished and world.is_main:
        say(f"{unfinished} was not finished: resuming from {folders[0].name if folders else 'the start'}")
    for path, before in zip(folders, [*folders[1:], None], strict=False):
        wrong = world.from_rank0(lambda path=path: unusable(path, run_id)) or _damage(path, world)
        if not wrong:
            return path
        if before is None:
            others = ", and no newer one can be used either" if len(folders) > 1 else ""
            refusal = f"{path} {wrong}{others}: nothing to resume from; start again without --resume, into another run "
            raise alike(CheckpointError(refusal + "(--set name=...)"))
        if world.is_main:
            say(f"{path} {wrong}: going back to {before.name}")
    return None


def _newest_first(folder: Path) -> tuple[list[Path], Path | None]:
    """(folders named like a checkpoint, newest first; an unfinished one that is newer, or None)"""
    folders = sorted((path for path in folder.glob("step_*") if path.is_dir()), reverse=True)
    begun = max(folder.glob(".step_*.partial"), default=None)
    return folders, begun if begun and (not folders or begun.name[1:] > folders[0].name) else None


def unusable(path: Path, run_id: str | None) -> str:
    """Why a checkpoint's note rules it out, to follow its name; empty if it does not."""
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
