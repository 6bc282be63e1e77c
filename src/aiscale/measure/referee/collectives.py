"""Watches collectives: which ones a rank calls, in which order, on which group, with what.

A line of JSON for each goes to a file at once, so that the order is known even of ranks that hang
or die. What DDP, FSDP and DTensor send inside torch is not among them; `traffic.py` sums it."""

from __future__ import annotations

import functools
import inspect
import json
from pathlib import Path

import torch
import torch.distributed as dist

from aiscale.measure.referee.modules import tensors_in
from aiscale.measure.referee.recorder import Recorder

_OPERATIONS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "reduce",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "barrier",
)
#: Ranks may pass tensors of different shapes to these.
_OF_ANY_SHAPE = ("all_gather", "all_to_all_single")


def watch_collectives(recorder: Recorder, folder: Path) -> None:
    log = open(folder / f"sent{recorder.rank}.jsonl", "a")
    recorder.alive.append(log)
    for operation in _OPERATIONS:
        setattr(dist, operation, _watched(recorder, log, operation, getattr(dist, operation)))


def _watched(recorder: Recorder, log, operation: str, original):
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args, **kwargs):
        group = signature.bind(*args, **kwargs).arguments.get("group") or dist.group.WORLD
        if isinstance(group, dist.ProcessGroup):  # not of a rank that is no member
            entry = _entry(recorder, operation, group, tensors_in([args, kwargs]))
            print(json.dumps(entry), file=log, flush=True)
        return original(*args, **kwargs)

    return call


def _entry(
    recorder: Recorder, operation: str, group: dist.ProcessGroup, sent: list[torch.Tensor]
) -> dict:
    is_equal_everywhere = sent and operation not in _OF_ANY_SHAPE
    return {
        "step": len(recorder.steps) - 1 + recorder.stepped,
        "ranks": dist.get_process_group_ranks(group),
        "operation": operation,
        "shape": list(sent[0].shape) if is_equal_everywhere else None,
        "of": _gradient_at(recorder, sent[0]) if sent else None,
    }


def _gradient_at(recorder: Recorder, tensor: torch.Tensor) -> str | None:
    """The parameter whose gradient this is."""
    for name, parameter in recorder.parameters:
        gradient = parameter.grad
        if (
            type(gradient) is torch.Tensor
            and gradient.data_ptr() == tensor.data_ptr()
            and tensor.numel()
        ):
            return name
    return None
