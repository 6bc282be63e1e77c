"""Ends a job in which ranks wait for one that does not come, and names that rank and its line.

A thread of each rank writes into the store by which ranks met: what the rank has begun, by torch's
flight recorder, and where its main thread is. A rank that has waited too long reads what all wrote.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

HUNG = 76  #: exit status; a launcher may start the job again
_TORCH = os.path.dirname(torch.__file__)
_PYTHON = os.path.dirname(os.__file__)


def begun() -> dict[str, list]:
    """{group: [number of its last collective, name, sizes]}, of this rank."""
    recorded = _distributed_c10d._dump_fr_trace_json()
    if torch.cuda.is_available():
        recorded = _distributed_c10d._dump_nccl_trace_json()
    last = {}
    for entry in json.loads(recorded).get("entries", []):
        if not entry["is_p2p"]:
            about = [entry["collective_seq_id"], entry["profiling_name"], entry["input_sizes"]]
            last[entry["process_group"][0]] = about
    return last


def this_node() -> str:
    """As Slurm names it, where there is Slurm."""
    return os.environ.get("SLURMD_NODENAME", socket.gethostname())


def line_of_main_thread() -> str:
    """The innermost line outside torch and Python's own library."""
    frame = sys._current_frames()[threading.main_thread().ident]
    for call in reversed(traceback.extract_stack(frame)):
        if not call.filename.startswith((_TORCH, _PYTHON, "<")):
            return f"{os.path.basename(call.filename)}:{call.lineno}"
    return "an unknown line"


def find_missing(mine: dict[str, list], tables: dict[int, dict], silent: set[int]):
    """(group, {rank: why}) of ranks that do not come to what this rank has begun last; or None.

    tables: {rank: {group: [number, name, sizes]}}. All ranks of a group begin the same collectives
    in the same order, so one with a smaller number, or with another collective, holds up the rest.
    """
    for group, (number, name, sizes) in mine.items():
        missing = {}
        for rank, table in tables.items():
            if rank in silent:
                missing[rank] = "no longer answers"
            elif group not in table:
                continue
            elif table[group][0] < number:
                missing[rank] = f"has begun {table[group][0]} of {number} collectives"
            elif table[group][0] == number and table[group][1:] != [name, sizes]:
                missing[rank] = f"is in {table[group][1]} of {table[group][2]}"
        if missing and len(missing) < len(tables):
            return group, missing
    return None


class Watch:
    """The thread of one rank."""

    def __init__(self, patience_s: float):
        self.patience_s = patience_s
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # A connection of its own: on torch's, another thread may be waiting for a key.
        store = dist.distributed_c10d._get_default_store().clone()
        self.store = dist.PrefixStore("watch", store)
        self.beats = 0
        self.heard = {}  #: rank -> (its beats, when they were first read)
        self.nodes = {}  #: rank -> the name of its node
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run, name="watch", daemon=True)

    def start(self):
        # A thread that still talks to the store when Python ends would abort the rank.
        atexit.register(self.stop)
        self.thread.start()

    def stop(self):
        self.over.set()
        self.thread.join(timeout=10)  # it may wait for a store that has gone

    def run(self):
        before, since_s = None, time.monotonic()
        while not self.over.wait(min(5.0, self.patience_s / 8)):
            now = begun()
            self.write(now)
            if now != before:
                before, since_s = now, time.monotonic()
            elif now and time.monotonic() - since_s > self.patience_s / 2:
                tables, lines = self.read()
                waited_s = time.monotonic() - since_s
                found = find_missing(now, tables, self.silent())
                if found and waited_s > self.patience_s:
                    self.end(found, tables, lines, now)

    def write(self, table):
        self.beats += 1
        told = [self.beats, table, line_of_main_thread(), this_node()]
        self.store.set(str(self.rank), json.dumps(told))

    def read(self):
        """({rank: its table}, {rank: its line}) of all ranks that have written."""
        tables, lines = {}, {}
        for rank in range(self.world_size):
            if self.store.check([str(rank)]):
                told = json.loads(self.store.get(str(rank)))
                beats, tables[rank], lines[rank], self.nodes[rank] = told
                if self.heard.get(rank, (0, 0))[0] != beats:
                    self.heard[rank] = (beats, time.monotonic())
        return tables, lines

    def silent(self) -> set[int]:
        limit_s = max(12.0, self.patience_s / 4)
        now_s = time.monotonic()
        return {rank for rank, (_, read_s) in self.heard.items() if now_s - read_s > limit_s}

    def end(self, found, tables, lines, mine):
        group, missing = found
        if self.rank != min(set(tables) - set(missing)):
            return  # the lowest waiting rank says it
        if self.store.add("over", 1) > 1:
            return  # another rank has said it
        number, name, sizes = mine[group]
        said = [f"ranks wait in {name} of {sizes}, number {number} of group {group}"]
        for rank, why in sorted(missing.items())[:8]:
            said.append(f"rank {rank} on {self.nodes[rank]} {why}, at {lines[rank]}")
        said.append(f"rank {self.rank} waits at {lines[self.rank]}")
        said.append(f"--patience was {self.patience_s:g} s")
        print(f"aiscale: {'; '.join(said)}", file=sys.stderr, flush=True)
        if "AISCALE_NOTE_SAVED" in os.environ:
            # The chain's next job does without these nodes.
            bad = sorted({f"bad {self.nodes[rank]}\n" for rank in missing})
            with suppress(OSError), open(os.environ["AISCALE_NOTE_SAVED"], "a") as file:
                file.writelines(["hung\n", *bad])
        os._exit(HUNG)


def watch(patience_s: float) -> None:
    """Starts the thread; call it after init_process_group."""
    watching = Watch(patience_s)
    watching.write(begun())  # or a rank that stops in its first seconds would be unknown
    watching.start()
