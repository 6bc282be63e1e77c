"""Replicas that come and go agree on who takes part, through files in a folder that only their user can open.

A round is a list of members with a process group of their own. It lasts until a member dies or somebody waits at
the door; then all who live gather anew. Rounds have numbers, and whoever first links a round's file has decided it.
A member of the round before is waited for, unless its agent has noted its end (gone-NAME) or it is silent for DEAD_S.
"""

import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

GRACE_S = 0.3  # when nobody has come for so long, the round is decided
DEAD_S = 10  # a member that is silent for so long counts as dead; when a process ends, its peers are told at once


def may_begin(done, begun, replicas):
    """Whether those at the door may form a round without the others.

    done: the steps that each of them has done, -1 for a newcomer. begun: the same of the newest round, [] before it.
    """
    return len(done) == replicas or max(done) >= max([0, *begun])  # somebody knows the weights


class Members:
    def __init__(self, folder, name, replicas, patience_s=120):
        self.folder, self.name, self.replicas = Path(folder), f"{name}-{os.getpid()}", replicas
        self.patience_s, self.size = patience_s, 0
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        seen = self.folder.lstat()
        if seen.st_uid != os.getuid() or seen.st_mode & 0o077:
            raise SystemExit(f"others can open {folder}: name a folder of your own with mode 700")

    def gather(self, done, everybody=False):
        """Form a round with all who live and connect them. Returns the steps that each has done, by rank."""
        while True:
            self.leave()
            number, members = self._agree(done, everybody)
            self.rank, self.size = list(members).index(self.name), len(members)
            meet = dist.FileStore(str(self.folder / f"meet-{number}"))
            try:
                limit = timedelta(seconds=DEAD_S)
                dist.init_process_group("gloo", store=meet, rank=self.rank, world_size=self.size, timeout=limit)
                return list(members.values())
            except RuntimeError:  # somebody died before it came: the next round
                continue

    def _agree(self, done, everybody):
        """Wait at the door for a round with us in it. Returns its number, and the steps of each member."""
        asked, seen, changed, came = -1, {}, 0.0, 0.0
        until = time.monotonic() + self.patience_s
        while time.monotonic() < until:
            newest, members = self._newest()
            if asked == newest - 1 and self.name in members:
                self.round = newest
                return newest, members
            if asked != newest:
                self._write(f"door-{self.name}", {"after": newest, "done": done})
                asked, came = newest, time.monotonic()
            waiting = self._waiting(newest)
            if waiting != seen:
                seen, changed = waiting, time.monotonic()
            steps = list(waiting.values())
            complete = len(waiting) == self.replicas if everybody else may_begin(steps, members.values(), self.replicas)
            late = self._alive(members) - waiting.keys()
            if late and time.monotonic() - came < DEAD_S:
                complete = False
            if complete and time.monotonic() - changed > GRACE_S:
                self._decide(newest + 1, waiting)
            time.sleep(0.02)
        raise SystemExit(f"{self.name} has waited {self.patience_s} s for others: go on from a checkpoint")

    def somebody_waits(self):
        return bool(self._waiting(self.round))

    def _alive(self, members):
        return {name for name in members if not (self.folder / f"gone-{name}").exists()}

    def _newest(self):
        """The newest round's number, and its members' steps; 0 before the first."""
        numbers = [int(path.name.split("-")[1]) for path in self.folder.glob("round-*")]
        return (newest := max(numbers, default=0)), self._read(f"round-{newest}") if newest else {}

    def _waiting(self, newest):
        """Who asks for the round after the newest, with the steps that each has done, in the order of names."""
        tickets = {path.name.removeprefix("door-"): self._read(path.name) for path in self.folder.glob("door-*")}
        return {name: tickets[name]["done"] for name in sorted(tickets) if tickets[name]["after"] == newest}

    def _decide(self, number, members):
        self._write(f"mine-{self.name}", members)
        try:
            os.link(self.folder / f"mine-{self.name}", self.folder / f"round-{number}")
        except FileExistsError:  # another was first
            return

    def _write(self, name, content):
        part = self.folder / f"part-{self.name}"
        part.write_text(json.dumps(content))
        part.rename(self.folder / name)  # killed here, we leave no half file

    def _read(self, name):
        return json.loads((self.folder / name).read_text())

    def leave(self):
        """Close our connections: members who still wait for us are told."""
        if dist.is_initialized():
            dist.destroy_process_group()
