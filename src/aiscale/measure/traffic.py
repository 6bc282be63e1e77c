"""Counts what a rank of any script passes to collectives, between two lines of it.

    from aiscale.measure import traffic    # before init_process_group: torch then records them
    with traffic.count() as sent:
        loss.backward()
    print(sent)                    # all_reduce: calls 2, bytes 827,392

    torchrun --nproc-per-node=4 -m aiscale.measure.traffic train_ddp.py    # sum over a script

A payload is the whole buffer: the output of an all-gather, the input of a reduce-scatter. torch's
flight recorder has the collectives of NCCL and gloo, whichever library calls them, but not gloo's
sends and receives.
"""

from __future__ import annotations

import os
import pickle
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from aiscale.measure.distributed.counter import ENTRIES, Count, read

if dist.is_initialized() and "TORCH_FR_BUFFER_SIZE" not in os.environ:
    raise RuntimeError(
        "torch records no collectives here: import this module before init_process_group"
    )
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(ENTRIES))


class Sent(dict):
    """{"all_reduce": Count(calls=2, payload_bytes=827392)}: filled when `count`'s block ends."""

    def __str__(self) -> str:
        lines = (
            f"{op}: calls {count.calls}, bytes {count.payload_bytes:,}"
            for op, count in self.items()
        )
        return "\n".join(lines) or "nothing was sent"


@contextmanager
def count() -> Iterator[Sent]:
    """Counts the collectives that this rank begins inside."""
    before, sent = [read(dump)[1] for dump in _dumps()], Sent()
    yield sent
    for dump, first in zip(_dumps(), before, strict=True):
        for entry in read(dump, first)[0]:
            total = sent.setdefault(entry.op, Count())
            total.calls += 1
            total.payload_bytes += entry.payload_bytes


def _dumps() -> list[dict]:
    """The recorders of gloo and, in a torch for GPUs, of NCCL.

    gloo's does not know the ranks of a group.
    """
    dumps = [pickle.loads(c10d._dump_fr_trace(True, False, False))]
    if dist.is_nccl_available():
        dumps.append(pickle.loads(c10d._dump_nccl_trace(True, False, False)))
    groups = dist.distributed_c10d._world.pg_names
    ranks = {
        name: {"ranks": str(dist.get_process_group_ranks(group))} for group, name in groups.items()
    }
    return [{**dump, "pg_config": ranks} for dump in dumps]


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    # Where Python looks first for a script's imports.
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    with count() as sent:
        runpy.run_path(sys.argv[0], run_name="__main__")
    if os.environ.get("RANK", "0") == "0":
        print(sent)
