"""Saves and loads checkpoints with torch's distributed checkpoint (DCP); a folder is either complete or absent.

A checkpoint is written to a hidden temporary folder, each rank flushes its files to the disk, and the folder is
renamed. The note, aiscale.json, holds a checksum of every file (`integrity`).

Weights are stored under GPT's own names with their full shapes, so a run may resume with another number of ranks or
another strategy. DeepSpeed and Megatron-Core write formats of their own, as the note says: such a run resumes only in
the layout that wrote it, but `load_weights` reads its weights everywhere.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pkgutil
import secrets
import shutil
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from aiscale.checkpoint import integrity
from aiscale.distributed import PeerError, World, alike

FORMAT_VERSION = 1
#: format -> "module:function" that reads its weights: function(folder) -> {GPT's name: tensor}
READERS = {"deepspeed": "aiscale.parallel.zero:weights", "megatron": "aiscale.parallel.megatron:weights"}
NOTE = "aiscale.json"  #: written last
SEEN_WITHIN_S = 5  #: a file system of many nodes may show a new file late
_OTHER = "it is of another model or optimizer: give this run the settings of that one"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written; the message is one line that says what to do."""


def check_shared(folder: str | Path, world: World) -> None:
    """Raise CheckpointError on all ranks unless each sees a file that rank 0 writes beside `folder`: every node may
    have a folder of that name on its own disk. All ranks call it."""
    marker = Path(world.from_rank0(lambda: str(_marked(Path(folder)))))
    try:
        _all_see([marker], world)
    finally:
        if world.is_main:
            marker.unlink()


def _marked(folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    marker = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    marker.touch()
    return marker


def _all_see(paths: Iterable[Path], world: World) -> None:
    unseen = world.gather(_unseen(paths))
    for rank, path in enumerate(unseen):
        if path:
            where = f"rank {rank} does not see {path}, which another rank wrote"
            raise alike(CheckpointError(f"{where}: choose a folder that all nodes share (--runs-dir)"))


def _unseen(paths: Iterable[Path]) -> str:
    """The first path that does not appear in time; empty if all do."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    for path in paths:
        while not path.exists():
            if time.monotonic() > deadline:
                return str(path)
            time.sleep(0.05)
    return ""


def save(engine, folder: str | Path, *, step: int, keep: int = 2) -> Path:
    """Write an engine's state after `step` steps; the newest `keep` checkpoints in `folder` stay. All ranks call it."""
    folder, world = Path(folder), engine.world
    final = folder / f"step_{step:08d}"
    partial = folder / f".step_{step:08d}.partial"
    with quiet(), _written_or_gone(final, partial, world):
        world.from_rank0(lambda: _start(partial))
        with world.control():
            if engine.checkpoint_format == "dcp":
                dcp.save(engine.state(), checkpoint_id=partial, no_dist=world.size == 1)
            else:
                engine.write(partial)
        world.barrier()  # all ranks have finished their files
        # A rank that does not share the folder sees its own files only.
        names = sorted(set().union(*world.gather(integrity.files(partial))))
        _all_see([partial / name for name in names], world)
        mine = names[world.rank :: world.size]
        prints = world.gather(world.together(lambda: integrity.fingerprints(partial, mine)))
        files = {name: print_ for part in prints for name, print_ in part.items()}
        note = {**_note(engine, step), "files": files}
        world.from_rank0(lambda: _finish(partial, final, integrity.seal(note), keep))
    return final


@contextmanager
def _written_or_gone(final: Path, partial: Path, world: World) -> Iterator[None]:
    remedy = "free some space or ask for it; earlier checkpoints are untouched"
    with _refusal(f"cannot write {final}", remedy, PeerError, RuntimeError):
        try:
            yield
        except BaseException:
            if world.is_main:
                shutil.rmtree(partial, ignore_errors=True)  # frees a full disk
            raise


def load(engine, path: str | Path) -> int:
    """Load the checkpoint `path` into the engine; returns the number of optimizer steps taken."""
    path, world = Path(path), engine.world
    note = world.together(lambda: _readable_note(engine, path))
    with world.control(), quiet(), _refusal(f"cannot read {path}", _OTHER):
        if engine.checkpoint_format != "dcp":
            engine.read(path, note)
            return note["step"]
        state = world.together(lambda: engine.loadable(note))
        dcp.load(state, checkpoint_id=path, no_dist=world.size == 1)
    engine.load(state)
    return note["step"]


def _readable_note(engine, path: Path) -> dict:
    note = read_note(path)
    if note["format"] != engine.checkpoint_format:
        wrote, reads = note["layout"]["strategy"], engine.run.parallel.strategy
        raise CheckpointError(
            f"{path} is of strategy {wrote}, which {reads} cannot read: set parallel.strategy={wrote}"
        )
    return note


def load_weights(model_state: dict, path: str | Path) -> None:
    """Fill `model_state` (a model's state_dict) from a checkpoint, in this process alone, without the optimizer."""
    path = Path(path)
    note = read_note(path)
    kind = note["format"]
    if wrong := integrity.damage(path, note, note["files"]):
        raise CheckpointError(f"{path} is damaged ({wrong}): delete it to use the one before")
    with quiet(), _refusal(f"cannot read {path}", _OTHER):
        if kind == "dcp":
            dcp.load({"model": model_state}, checkpoint_id=path, no_dist=True)
            return
        weights = pkgutil.resolve_name(READERS[kind])(Path(path))
    for name, tensor in model_state.items():
        tensor.copy_(weights[name])


def latest(folder: str | Path) -> Path | None:
    """The newest complete checkpoint below `folder`, or None."""
    return max(whole(Path(folder)), default=None)


def whole(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path.parent for path in folder.glob(f"step_*/{NOTE}"))


def read_note(path: Path) -> dict:
    try:
        note = json.loads((path / NOTE).read_text())
        version, _, _ = note["format_version"], note["step"], note["format"]
    except (OSError, ValueError, TypeError, KeyError):
        raise CheckpointError(f"{path} is not a checkpoint of aiscale: it has no readable {NOTE}") from None
    if note != integrity.seal(note):
        raise CheckpointError(f"{path} is damaged: {NOTE} is not what was written; delete it to use the one before")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version}, not {FORMAT_VERSION}: use the aiscale that wrote it"
        )
    return note


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        for message in ("torch.distributed is disabled", "TypedStorage is deprecated"):
            warnings.filterwarnings("ignore", message=message)
        yield


@contextmanager
def _refusal(what: str, remedy: str, *more: type[Exception]) -> Iterator[None]:
    """Turn errors of the disk and DCP (and `more`) into one line: DCP's message lists every rank's traceback."""
    try:
        yield
    except (OSError, CheckpointException, *more) as error:
        # On a full disk, torch.save reports only an unexpected position of its writer.
        short = any(part in str(error) for part in ("inline_container", "PytorchStreamWriter", "unexpected pos"))
        if isinstance(error, CheckpointError) or type(error) is RuntimeError and not short:
            raise
        # DCP raises an error of one rank on all ranks.
        on_all_ranks = isinstance(error, CheckpointException) or getattr(error, "failed_alike", False)
        cause = next((cause for cause, _ in getattr(error, "failures", {}).values()), error)
        if isinstance(cause, KeyboardInterrupt):  # DCP wraps it, too
            raise cause from None
        if short:
            cause = OSError("torch could write only a part: the disk, or your share of it, is full")
        reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        refusal = CheckpointError(f"{what} ({reason}): {remedy}")
        raise (alike(refusal) if on_all_ranks else refusal) from error


def _start(partial: Path) -> None:
    partial.parent.mkdir(parents=True, exist_ok=True)
    for stale in partial.parent.glob(".step_*"):
        shutil.rmtree(stale)
    partial.mkdir()


def _note(engine, step: int) -> dict:
    return {
        "format_version": FORMAT_VERSION,
        "format": engine.checkpoint_format,
        "step": step,
        "world_size": engine.world.size,
        "layout": dataclasses.asdict(engine.run.parallel),
        **engine.note(),
    }


def _finish(partial: Path, final: Path, note: dict, keep: int) -> None:
    (partial / NOTE).write_text(json.dumps(note, indent=2))
    for path in (*partial.rglob("*"), partial):
        flush(path)
    if final.exists():
        _delete(final)
    partial.rename(final)
    flush(final.parent)
    for path in [path for path in whole(final.parent) if path <= final][:-keep]:
        _delete(path)


def _delete(path: Path) -> None:
    """Rename first: an interrupted deletion leaves no folder that looks like a checkpoint."""
    gone = path.with_name(f".{path.name}.old")
    path.rename(gone)
    shutil.rmtree(gone)


def flush(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk. Only the node that wrote it can do so."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
