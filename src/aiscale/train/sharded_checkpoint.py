"""A checkpoint in a folder, to which each rank writes its slices. Other numbers of ranks read it.

A folder is whole or absent: it is written under another name, flushed and renamed. Its note, which
is written last, has a digest of each file; `load` takes the newest folder that is undamaged.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from aiscale.train.refusal import BAD_SETTINGS, refuse

#: Works also where ranks optimize different parameters.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
NOTE = "note.json"
KEPT = 2  #: so many of the newest folders stay


def gather(value):
    """Every rank's value, on every rank; as JSON, so that what arrives is read and never run."""
    mine = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(mine)]))
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
    padded[: len(mine)] = mine
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded)
    return [json.loads(bytes(text[:size].tolist())) for text, size in zip(texts, sizes)]


def check_shared(path):
    """Stops all ranks unless each sees a file that rank 0 writes in the folder `path`."""
    marker = Path(gather(f"{path}/.{os.urandom(8).hex()}")[0])  # rank 0's
    if dist.get_rank() == 0:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    dist.barrier()  # no rank looks before
    until = time.monotonic() + 5  # a file system of many nodes may show a new file late
    while not marker.exists() and time.monotonic() < until:
        time.sleep(0.05)
    seen = gather(marker.exists())
    if dist.get_rank() == 0:
        marker.unlink()
    if not all(seen):
        where = f"does not see what rank 0 writes in {Path(path).resolve()}"
        remedy = "choose a --save folder that all nodes share"
        refuse(f"rank {seen.index(False)} {where}: {remedy}")


def write(path, steps, fill):
    """`fill(folder)` on all ranks, then a note, then the folder's name."""
    rank, size = dist.get_rank(), dist.get_world_size()
    final = Path(path) / f"{steps:08}"
    partial = final.with_suffix(".part")
    if rank == 0:
        for left in Path(path).glob("[0-9]*.part"):  # by a job that was killed while it wrote
            shutil.rmtree(left)
        partial.mkdir(parents=True)
    dist.barrier()
    try:
        fill(partial)
    except (Exception, CheckpointException) as error:
        end_unwritten(partial, error)
    dist.barrier()
    files = sorted(file for file in partial.rglob("*") if file.is_file())
    mine = {str(file.relative_to(partial)): digest_of(file) for file in files[rank::size]}
    digests = gather(mine)
    if rank == 0:
        note = {"steps": steps, "files": {}}
        for each in digests:
            note["files"].update(each)
        (partial / NOTE).write_text(json.dumps(note, indent=1))
        for each in (*partial.rglob("*"), partial):
            flush(each)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        flush(final.parent)
        for old in folders(path)[KEPT:]:
            shutil.rmtree(old)
    dist.barrier()
    if rank == 0 and "AISCALE_NOTE_SAVED" in os.environ:  # a launcher reads it when the job ends
        Path(os.environ["AISCALE_NOTE_SAVED"]).write_text(f"{final}\n")


def end_unwritten(partial, error):
    """One line where a checkpoint cannot be written, as on a full disk."""
    number, told_to_all = dist.get_rank(), isinstance(error, CheckpointException)
    if told_to_all and error.failures:  # Megatron-Core's other ranks know only that it failed
        number, (error, _) = next(iter(error.failures.items()))
    shutil.rmtree(partial, ignore_errors=True)
    why = str(error).partition("\n")[0]
    said = f"rank {number} could not write {partial}: {type(error).__name__}: {why}"
    said += "; earlier checkpoints are untouched: see that the disk has space, and start again"
    if told_to_all:
        refuse(said)
    print(f"aiscale: {said}", file=sys.stderr, flush=True)
    sys.exit(BAD_SETTINGS)


def folders(path):
    """Checkpoints, the newest first."""
    return sorted(Path(path).glob("[0-9]" * 8), reverse=True)


def newest(path):
    """(the newest undamaged folder, its steps), or (None, 0). Each that is passed over is named."""
    check_shared(path)  # else slices would lie on several disks
    rank, size = dist.get_rank(), dist.get_world_size()
    found = gather([str(folder) for folder in folders(path)])[0]  # rank 0 looks, all follow
    for folder in map(Path, found):
        steps, damaged = int(folder.name), []
        try:
            note = json.loads((folder / NOTE).read_text())
            if note["steps"] != steps:
                damaged.append(NOTE)
            for name in sorted(note["files"])[rank::size]:
                if not (folder / name).is_file() or digest_of(folder / name) != note["files"][name]:
                    damaged.append(name)
        except (OSError, ValueError, KeyError):
            damaged.append(NOTE)
        damaged = [name for names in gather(damaged) for name in names]
        if not damaged:
            return folder, steps
        if rank == 0:
            say = f"{folder} is damaged ({damaged[0]} is not what was written): going back"
            print(say, file=sys.stderr, flush=True)
    if found:
        refuse(f"{path}: all checkpoints are damaged; start anew with another --save")
    return None, 0


def save(path, model, optimizer, steps, **more):
    """Writes weights and optimizer states, and the tensors of `more`. All ranks call it."""
    weights, moments = get_state_dict(model, optimizer, options=FLAT)  # by names of whole tensors
    state = {"model": weights, "optimizer": moments, **more}
    write(path, steps, lambda folder: dcp.save(state, checkpoint_id=folder))


def load(path, model, optimizer, **more):
    """The steps that the newest checkpoint has seen, or 0; fills the tensors of `more`."""
    folder, steps = newest(path)
    if folder:
        weights, moments = get_state_dict(model, optimizer, options=FLAT)
        # What belonged to one rank is not there for another number of ranks.
        stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        kept = {key.split(".")[0] for key in stored}
        more = {name: tensors for name, tensors in more.items() if name in kept}
        state = {"model": weights, "optimizer": moments, **more}
        dcp.load(state, checkpoint_id=folder)  # each rank reads what it needs, whoever wrote it
        parts = {"model_state_dict": weights, "optim_state_dict": moments}
        set_state_dict(model, optimizer, **parts, options=FLAT)
    return steps


def digest_of(file):
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()


def flush(path):
    """A file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
