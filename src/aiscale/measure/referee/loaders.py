"""Keeps what a DataLoader yields, and gives one rank the batches of all ranks.

Where the order of the data depends on the number of ranks, one rank reads what many have read: all
that follows can be compared then.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from aiscale.measure.referee import trace
from aiscale.measure.referee.recorder import Recorder

_MOST_BYTES = 2**28  #: of batches that a rank keeps


class Unknown(TypeError):
    """A batch of something else than tensors, numbers and words in dicts and lists."""


def keep_batches(recorder: Recorder) -> None:
    original = DataLoader.__iter__
    kept: list = []
    state = {"epoch": -1, "bytes": 0}
    recorder.batches = kept

    def iterate(loader):
        state["epoch"] += 1
        epoch = state["epoch"]
        for batch in original(loader):
            _keep(recorder, kept, state, epoch, batch)
            yield batch

    DataLoader.__iter__ = iterate


def _keep(recorder: Recorder, kept: list, state: dict, epoch: int, batch) -> None:
    if recorder.batches is None:
        return
    try:
        copied = _plain(batch)
    except Unknown:
        recorder.batches = None
        return
    state["bytes"] += _bytes(copied)
    kept.append((epoch, copied))
    if state["bytes"] > _MOST_BYTES:
        recorder.batches = None


def _plain(batch):
    """A copy in containers that load without running code."""
    if isinstance(batch, torch.Tensor):
        return batch.detach().clone()
    if isinstance(batch, Mapping):
        return {key: _plain(value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_plain(value) for value in batch)
    if isinstance(batch, list):
        return [_plain(value) for value in batch]
    if batch is None or isinstance(batch, int | float | str):
        return batch
    raise Unknown(type(batch).__name__)


def _bytes(batch) -> int:
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return sum(_bytes(each) for each in batch)
    return 0


def give_batches(folder: Path) -> None:
    """Let each DataLoader yield what the ranks of the run in `folder` have read, put together."""
    ranks = []
    for path in sorted(folder.glob("batches*.pt")):
        ranks.append(trace.load(path))
    state = {"epoch": -1}

    def iterate(loader):
        state["epoch"] += 1
        epoch = state["epoch"]
        mine = [[batch for number, batch in rank if number == epoch] for rank in ranks]
        for parts in zip(*mine, strict=False):
            yield _joined(list(parts))

    DataLoader.__iter__ = iterate


def _joined(parts: list):
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts) if first.dim() else first
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_joined(list(each)) for each in zip(*parts, strict=True))
    return first
