"""Counts what a rank has sent, by collective and group, and records the latest it has begun.

    traffic.snapshot()          # by group size: {("all_reduce", 4): Count(calls=1, ...)}
    traffic.groups()            # by group: {("all_reduce", Group("dp", (0, 2))): Count(...)}
    traffic.progress.table()    # latest by group, with number, seconds ago and step:
                                # {"dp 0-6/2": [7, "all_reduce", 4096, 0.1, 3]}

`wire` records gloo's calls; for NCCL `pull` reads torch's flight recorder (`attach`). In these
tables a message is a collective of its two ranks, sender and receiver ("3>5").
"""

from __future__ import annotations

import ast
import os
import pickle
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, TypeVar

Key = TypeVar("Key")
ANY_SOURCE = "*"

#: part of the description that a library gives its groups -> our name; the first match wins.
#: Megatron-Core writes capitals ("DATA_PARALLEL_GROUP_WITH_CP"), a device mesh calls the group of
#: its axis dp "mesh_dp".
_NAMES = (
    ("default_pg", "world"),
    ("OPTIMIZER_INSTANCE", "optimizer"),
    ("POSITION_EMBEDDING", "position embedding"),
    ("EMBEDDING", "embedding"),
    ("TENSOR_AND_DATA", "tp-dp"),
    ("DATA_PARALLEL", "dp"),
    ("CONTEXT_PARALLEL", "cp"),
    ("TENSOR_MODEL_PARALLEL", "tp"),
    ("PIPELINE_MODEL_PARALLEL", "pp"),
    ("MODEL_PARALLEL", "tp-pp"),
)


class Group(NamedTuple):
    """The label of a process group."""

    name: str  #: world, dp, tp, pp, ...; "ranks" if it has no name
    ranks: tuple[int, ...]  #: global ranks, in the order of the group

    def __str__(self) -> str:
        return f"{self.name} {','.join(map(str, self.ranks))}"

    @property
    def label(self) -> str:
        """A short form, the same on all its ranks: ("dp", (0, 2, 4, 6)) -> "dp 0-6/2".

        `members` parses it.
        """
        ranks, stride = self.ranks, self.ranks[1] - self.ranks[0] if len(self.ranks) > 1 else 1
        if (
            len(ranks) > 2
            and stride > 0
            and list(ranks) == list(range(ranks[0], ranks[-1] + 1, stride))
        ):
            return f"{self.name} {ranks[0]}-{ranks[-1]}" + (f"/{stride}" if stride > 1 else "")
        return str(self)


def message(source: int | str, target: int) -> str:
    """The label of messages from one rank (or ANY_SOURCE) to another."""
    return f"{source}>{target}"


def members(label: str) -> list[int]:
    if ">" in label:
        return [int(rank) for rank in label.split(">") if rank != ANY_SOURCE]
    ranks = label.rpartition(" ")[2]
    first, dash, last = ranks.partition("-")
    if not dash:
        return [int(rank) for rank in ranks.split(",")]
    last, _, stride = last.partition("/")
    return list(range(int(first), int(last) + 1, int(stride or 1)))


def group_name(description: str, ranks: tuple[int, ...], world_size: int) -> str:
    if description.startswith("mesh_"):
        return description.removeprefix("mesh_")
    for part, name in _NAMES:
        if part in description:
            return name
    if description and description != "undefined":
        return description
    return "world" if len(ranks) == world_size else "ranks"


@dataclass
class Count:
    calls: int = 0
    payload_bytes: int = 0

    def __sub__(self, earlier: Count) -> Count:
        return Count(self.calls - earlier.calls, self.payload_bytes - earlier.payload_bytes)


class Progress:
    """The latest collective that this rank has begun in every group: its number, name and size."""

    def __init__(self) -> None:
        self.latest_s = time.monotonic()  #: when the latest one was begun
        #: () -> {group: (number, op, bytes, seconds ago)}, from NCCL's flight recorder
        self.pull: Callable[[], dict[str, tuple[int, str, int, float]]] | None = None
        self._step = 0
        self._begun: dict[str, tuple[int, str, int, float, int]] = {}
        self._lock = threading.Lock()

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step, self.latest_s = step, time.monotonic()

    def begin(self, op: str, group: str, nbytes: int) -> None:
        """Record that a collective begins.

        group: the same text on all its ranks, `Group.label` or `message`.
        """
        now = time.monotonic()
        with self._lock:
            number = self._begun[group][0] if group in self._begun else 0
            self._begun[group] = (number + 1, op, nbytes, now, self._step)
            self.latest_s = now

    def table(self) -> dict[str, list]:
        """{group: [number, op, bytes, seconds ago, step]}."""
        now = time.monotonic()
        with self._lock:
            begun = dict(self._begun)
        for group, (number, op, nbytes, age_s) in (self.pull() if self.pull else {}).items():
            begun[group] = (number, op, nbytes, now - age_s, self._step)
            self.latest_s = max(self.latest_s, now - age_s)
        return {group: [*what, now - at, step] for group, (*what, at, step) in begun.items()}


@dataclass
class Traffic:
    """What this rank has communicated. Bookkeeping is counted separately."""

    #: latest collective of each group
    progress: Progress = field(default_factory=Progress, repr=False)
    _counts: dict[tuple[str, Group], Count] = field(
        default_factory=lambda: defaultdict(Count), repr=False
    )
    _control: dict[tuple[str, Group], Count] = field(
        default_factory=lambda: defaultdict(Count), repr=False
    )
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    in_control: int = 0  #: how many control() blocks are open
    #: (start, end), for `pull`
    _control_ns: list[tuple[int, int]] = field(default_factory=list, repr=False)
    pull: Callable[[], None] | None = field(default=None, repr=False)  #: adds what the recorder has

    def add(self, op: str, group: Group, payload_bytes: int, time_ns: int | None = None) -> None:
        """Count one call, made now or at time_ns."""
        with self._lock:
            control = (
                self.in_control
                if time_ns is None
                else any(a <= time_ns <= b for a, b in self._control_ns)
            )
            count = (self._control if control else self._counts)[op, group]
            count.calls += 1
            count.payload_bytes += payload_bytes

    @contextmanager
    def control(self) -> Iterator[None]:
        """Count what is sent inside (loss averages, stop flags, saving) as bookkeeping."""
        self.in_control += 1
        start_ns = time.time_ns()
        try:
            yield
        finally:
            self.in_control -= 1
            if self.pull and not self.in_control:
                self._control_ns.append((start_ns, time.time_ns()))

    @property
    def control_counts(self) -> dict[tuple[str, int], Count]:
        return self._by(self._control, lambda op, group: (op, len(group.ranks)))

    def snapshot(self) -> dict[tuple[str, int], Count]:
        """The training traffic so far, by (collective, group size)."""
        return self._by(self._counts, lambda op, group: (op, len(group.ranks)))

    def since(self, earlier: dict[tuple[str, int], Count]) -> dict[tuple[str, int], Count]:
        return _difference(self.snapshot(), earlier)

    def groups(self) -> dict[tuple[str, Group], Count]:
        """The training traffic so far, by (collective, group)."""
        return self._by(self._counts, lambda *cell: cell)

    def groups_since(
        self, earlier: dict[tuple[str, Group], Count]
    ) -> dict[tuple[str, Group], Count]:
        return _difference(self.groups(), earlier)

    def _by(self, counts: dict, key: Callable[[str, Group], Key]) -> dict[Key, Count]:
        if self.pull and not self.in_control:
            self.pull()
            self._control_ns.clear()
        totals: dict[Key, Count] = {}
        with self._lock:
            for cell, count in counts.items():
                total = totals.setdefault(key(*cell), Count())
                total.calls += count.calls
                total.payload_bytes += count.payload_bytes
        return totals


def _difference(later: dict[Key, Count], earlier: dict[Key, Count]) -> dict[Key, Count]:
    diff = {key: count - earlier.get(key, Count()) for key, count in later.items()}
    return {key: count for key, count in diff.items() if count.calls}


# NCCL, from torch's flight recorder: a ring of every collective as it is enqueued ----------------


ENTRIES = 20_000

# of c10::ScalarType
_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2}
#: part of the recorder's name for a call -> (collective, which side holds the whole buffer); the
#: first match wins. A coalesced batch of messages is recorded once as a whole, without sizes, and
#: once per message.
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
    # an earlier world of this process may have filled the ring
    following = {"record": 0, "start_ns": time.time_ns()}

    def recorded() -> dict:
        from torch._C import _distributed_c10d as c10d  # with NCCL only

        return pickle.loads(c10d._dump_nccl_trace(True, False, False))

    def pull() -> None:
        entries, following["record"] = read(recorded(), following["record"])
        for entry in entries:
            if entry.time_ns >= following["start_ns"]:
                traffic.add(entry.op, entry.group, entry.payload_bytes, time_ns=entry.time_ns)

    traffic.pull = pull
    traffic.progress.pull = lambda: latest(recorded(), following["start_ns"])


def latest(dump: dict, start_ns: int = 0) -> dict[str, tuple[int, str, int, float]]:
    """{group's label: (number, op, bytes, seconds ago)} of its latest collective, for `progress`.

    Messages are left out: the recorder numbers them by group, not by sender and receiver.
    """
    records: dict[tuple, dict] = {}
    for record in dump.get("entries", []):
        if (
            record.get("collective_seq_id")
            and not record.get("is_p2p")
            and record["time_created_ns"] >= start_ns
        ):
            records[tuple(record["process_group"])] = record
    groups, newest = dump.get("pg_config", {}), {}
    for record in sorted(records.values(), key=lambda record: record["time_created_ns"]):
        group = _group(record["process_group"], groups)
        if len(group.ranks) < 2:
            continue
        entry, name = _entry(record, groups), group.label
        if entry:
            op, nbytes = entry.op, entry.payload_bytes
        else:
            op, nbytes = record["profiling_name"].partition(":")[2], 0
        # libraries make several groups of the same ranks
        before = newest[name][0] if name in newest else 0
        age_s = max(0.0, (time.time_ns() - record["time_created_ns"]) / 1e9)
        newest[name] = (before + record["collective_seq_id"], op, nbytes, age_s)
    return newest


def read(dump: dict, first: int = 0) -> tuple[list[Entry], int]:
    """(calls from record number `first` on, number of the next record)."""
    records = [record for record in dump.get("entries", []) if record["record_id"] >= first]
    if records and first and records[0]["record_id"] > first:
        warnings.warn(
            f"{records[0]['record_id'] - first} calls were overwritten before they were counted: "
            f"set TORCH_FR_BUFFER_SIZE above {ENTRIES}, or count more often",
            stacklevel=2,
        )
    entries = [
        entry
        for record in records
        if (entry := _entry(record, dump.get("pg_config", {}))) is not None
    ]
    return entries, records[-1]["record_id"] + 1 if records else first


def _entry(record: dict, groups: dict) -> Entry | None:
    name = record["profiling_name"].partition(":")[2]
    what = next((what for part, what in _OPS if part in name), None)
    if what is None:
        return None
    op, side = what
    sizes, dtypes = record[f"{side}_sizes"], record[f"{side}_dtypes"]
    payload = sum(
        prod(size) * _BYTES.get(dtype, 1) for size, dtype in zip(sizes, dtypes, strict=False)
    )
    group = _group(record["process_group"], groups)
    # the recorder has one rank's share
    payload *= len(group.ranks) if op in ("gather", "scatter") else 1
    return Entry(op, group, payload, record["time_created_ns"])


def _group(process_group: tuple[str, str], groups: dict) -> Group:
    number, description = process_group
    ranks = tuple(ast.literal_eval(str(groups.get(number, {}).get("ranks") or "[]")))
    world_size = max(
        (len(ast.literal_eval(str(g.get("ranks") or "[]"))) for g in groups.values()),
        default=len(ranks),
    )
    return Group(group_name(description, ranks, world_size), ranks)
