"""Counts NCCL's collectives, and tells the watchdog about them, from torch's flight recorder.

    flight.attach(traffic)         # from now on traffic.snapshot() and groups() include NCCL
    flight.read(dump, first=0)     # ([Entry(op, group, payload_bytes, time_ns)], next record) of one dump

NCCL itself is not wrapped. The recorder is a ring of every collective as it is enqueued, from any thread: attach makes
it hold ENTRIES calls, and `read` warns if more were overwritten between two readings.
"""

from __future__ import annotations

import ast
import os
import pickle
import time
import warnings
from dataclasses import dataclass
from math import prod

from aiscale.distributed.counter import Group, Traffic, group_name

ENTRIES = 20_000

_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2}  # of c10::ScalarType
#: part of the recorder's name for a call -> (collective, which side holds the whole buffer); the first match wins.
#: A coalesced batch of messages is recorded once as a whole, without sizes, and once per message.
_OPS = (
    ("barrier", None),
    ("coalesced", None),
    ("all_reduce", ("all_reduce", "input")),
    ("allreduce", ("all_reduce", "input")),
    ("reduce_scatter", ("reduce_scatter", "input")),
    ("all_gather", ("all_gather", "output")),
    ("allgather", ("all_gather", "output")),
    ("gather", ("gather", "input")),
    ("scatter", ("scatter", "output")),
    ("broadcast", ("broadcast", "input")),
    ("all_to_all", ("all_to_all", "input")),
    ("reduce", ("reduce", "input")),
    ("send", ("send", "input")),
    ("recv", ("recv", "output")),
)


@dataclass(frozen=True)
class Entry:
    op: str
    group: Group
    payload_bytes: int
    time_ns: int  #: when it was enqueued, on the clock of time.time_ns


def attach(traffic: Traffic) -> None:
    """Let `traffic` count what NCCL does. Call it before the first process group is made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(ENTRIES))
    following = {"record": 0, "start_ns": time.time_ns()}  # an earlier world of this process may have filled the ring

    def pull() -> None:
        from torch._C import _distributed_c10d as c10d

        dump = pickle.loads(c10d._dump_nccl_trace(True, False, False))
        entries, following["record"] = read(dump, following["record"])
        for entry in entries:
            if entry.time_ns >= following["start_ns"]:
                traffic.add(entry.op, entry.group, entry.payload_bytes, time_ns=entry.time_ns)

    def begun() -> dict[str, tuple[int, str, int, float]]:
        from torch._C import _distributed_c10d as c10d

        return latest(pickle.loads(c10d._dump_nccl_trace(True, False, False)), following["start_ns"])

    traffic.pull, traffic.progress.pull = pull, begun


def latest(dump: dict, start_ns: int = 0) -> dict[str, tuple[int, str, int, float]]:
    """{label of a group: (number, op, bytes, seconds ago)} of its latest collective, for `progress`. Messages are left
    out: the recorder numbers them by group, not by sender and receiver."""
    records: dict[tuple, dict] = {}
    for record in dump.get("entries", []):
        if record.get("collective_seq_id") and not record.get("is_p2p") and record["time_created_ns"] >= start_ns:
            records[tuple(record["process_group"])] = record
    groups, found = dump.get("pg_config", {}), {}
    for record in sorted(records.values(), key=lambda record: record["time_created_ns"]):
        group = _group(record["process_group"], groups)
        if len(group.ranks) < 2:
            continue
        entry, name = _entry(record, groups), group.label
        op, nbytes = (entry.op, entry.payload_bytes) if entry else (record["profiling_name"].partition(":")[2], 0)
        before = found[name][0] if name in found else 0  # libraries make several groups of the same ranks
        age_s = max(0.0, (time.time_ns() - record["time_created_ns"]) / 1e9)
        found[name] = (before + record["collective_seq_id"], op, nbytes, age_s)
    return found


def read(dump: dict, first: int = 0) -> tuple[list[Entry], int]:
    """(calls from record number `first` on, number of the next record)."""
    records = [record for record in dump.get("entries", []) if record["record_id"] >= first]
    if records and first and records[0]["record_id"] > first:
        warnings.warn(
            f"{records[0]['record_id'] - first} calls of NCCL were overwritten before they were counted: "
            f"set TORCH_FR_BUFFER_SIZE above {ENTRIES}, or count more often",
            stacklevel=2,
        )
    entries = [entry for record in records if (entry := _entry(record, dump.get("pg_config", {}))) is not None]
    return entries, records[-1]["record_id"] + 1 if records else first


def _entry(record: dict, groups: dict) -> Entry | None:
    name = record["profiling_name"].partition(":")[2]
    what = next((what for part, what in _OPS if part in name), None)
    if what is None:
        return None
    op, side = what
    sizes, dtypes = record[f"{side}_sizes"], record[f"{side}_dtypes"]
    payload = sum(prod(size) * _BYTES.get(dtype, 1) for size, dtype in zip(sizes, dtypes, strict=False))
    group = _group(record["process_group"], groups)
    payload *= len(group.ranks) if op in ("gather", "scatter") else 1  # the recorder has one rank's share
    return Entry(op, group, payload, record["time_created_ns"])


def _group(process_group: tuple[str, str], groups: dict) -> Group:
    number, description = process_group
    ranks = tuple(ast.literal_eval(str(groups.get(number, {}).get("ranks") or "[]")))
    world_size = max((len(ast.literal_eval(str(g.get("ranks") or "[]"))) for g in groups.values()), default=len(ranks))
    return Group(group_name(description, ranks, world_size), ranks)
