"""`cluster.start` and its `Ranks`: real processes in one process group, under a notebook's cells.

ranks = cluster.start(4)           # 4 ranks on this machine; then %%px cells run on every rank
ranks["loss"]                      # a variable of every rank, in rank order
ranks.run(function, argument)      # a call on every rank, results in rank order
ranks.stop()

A dead rank fails the cell within 20 s. The next cell works again, on the same ranks if they are
alive, else on new ones, unless these would have to queue. Stop first signals the busy ranks; then
idle ones leave the group, so that ranks which hang in gloo fail; the rest are killed. The same
happens to ranks that wait for one that has raised.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

from aiscale.environment import shorten_temporary_folder
from aiscale.lesson.cluster import cells, engine
from aiscale.lesson.cluster.errors import (
    ClusterError,
    RankDied,
    RankError,
    RanksInterrupted,
    name_ranks,
)
from aiscale.lesson.cluster.processes import LAUNCHERS, Processes
from aiscale.lesson.cluster.slurm import Job
from aiscale.private import STORE, keep_caches_private
from aiscale.processes import usable_cores

GRACE_S = 1.0  #: for the other ranks to finish or fail by themselves after one has failed
#: to answer a signal, and then closed connections (a first traceback is slow)
SIGNAL_ANSWER_S, ANSWER_S = 0.5, 15.0
#: Words in a rank's error that mean that its process group is broken and must not be used again.
_BROKEN_GROUP = (
    "gloo",
    "nccl",
    "connection closed",
    "process group",
    "timed out",
    "distnetwork",
    "diststore",
)

_current: Ranks | None = None


def start(
    size: int = 2,
    *,
    engines: str = "",
    threads: int = 0,
    device: str = "auto",
    timeout_s: float = 120.0,
    start_timeout_s: float = 0,
    **job: Any,
) -> Ranks:
    """Start `size` ranks and join them to one process group; prints one line.

    A second call reuses the first one's ranks if they were started in the same way: without their
    variables, in a new process group.

    engines: local, or slurm (with srun if this kernel is in a job, else in a job that is submitted,
    and cancelled when the ranks stop). Default: the variable AISCALE_ENGINES, else local. threads:
    per rank; 0 shares the cores. timeout_s: of a collective that hangs. start_timeout_s: for ranks
    to start, without the time in the queue; 0: 90 on this machine, 300 in a job. job: options of
    the submitted job (`slurm.Job`). Raises ClusterError.
    """
    global _current
    engines = engines or os.environ.get("AISCALE_ENGINES") or "local"
    if not isinstance(size, int) or size < 1:
        raise ClusterError(
            f"cluster.start({size!r}): the number of ranks must be a whole number of at least 1"
        )
    if engines not in LAUNCHERS:
        choices = ", ".join(LAUNCHERS)
        raise ClusterError(
            f"cluster.start: engines, or AISCALE_ENGINES, is {engines!r}: it must be one of "
            f"{choices}"
        )
    shorten_temporary_folder()
    began = time.monotonic()
    if engines != "slurm":  # under Slurm each rank's node knows its cores
        threads = threads or max(1, len(usable_cores()) // size)
    request = {
        "engines": engines,
        "threads": threads,
        "device": device,
        "timeout_s": timeout_s,
        "job": Job.of(job),
    }
    keep_caches_private()  # of this kernel, too: a cell may call torch.compile
    reused = _current is not None and _current._renew(size, request)
    if not reused:
        stop()
        _current = Ranks(size, start_timeout_s=start_timeout_s, **request)
        atexit.register(_current.stop)
    if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()) is not None:
        shell.register_magics(cells.RankMagics(shell, _current))
    note = "reused, with a new process group and no variables" if reused else ""
    _current._greet(time.monotonic() - began, note)
    return _current


def stop() -> None:
    """Stop the ranks of this kernel, if there are any."""
    if _current is not None:
        _current.stop()


def current() -> Ranks | None:
    """The ranks of this kernel that can be used, if there are any."""
    return None if _current is None or _current._stopped else _current


class Ranks:
    """The ranks of one cluster. Made by `start`."""

    def __init__(self, size: int, *, start_timeout_s: float, **request: Any) -> None:
        self.size = size
        self.view = None  #: ipyparallel's DirectView, in rank order
        self.info: list[dict] = []  #: of every rank: pid, host, device, backend, threads
        self._request = request
        self._start_timeout_s = start_timeout_s or (90 if request["engines"] == "local" else 300)
        self._processes: Processes | None = None
        self._must_join = False
        self._lost = ""  #: why the processes are gone, once that has been reported
        self._stopped = False
        self._kernel_pid = os.getpid()
        self._bring_up()

    def run(self, function: Callable, *args: Any, **kwargs: Any) -> list:
        """Call `function` on every rank; shows its prints, returns its results in rank order."""
        self._ready()
        return self._finish(self.view.apply_async(function, *args, **kwargs), show=True)

    def execute(self, code: str) -> None:
        """Run source code on every rank, as a `%%px` cell does."""
        self._ready()
        self._finish(self.view.execute(code, silent=False, block=False), show=True)

    def __getitem__(self, name: str) -> list:
        self._ready()
        return self._finish(self.view.pull(name, block=False))

    def __setitem__(self, name: str, value: Any) -> None:
        self._ready()
        self._finish(self.view.push({name: value}, block=False))

    def __len__(self) -> int:
        return self.size

    __iter__ = None  # or Python would try ranks[0], ranks[1], ...

    def stop(self) -> None:
        """End the ranks. A second call does nothing."""
        # A fork of the kernel must not stop its ranks.
        if not self._stopped and os.getpid() == self._kernel_pid:
            self._stopped = True
            atexit.unregister(self.stop)
            self._tear_down()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        ends = self._processes.exits() if self._processes else []
        lost = self._lost or (ends[0].message if ends else "")
        return f"<{self.size} ranks, {'stopped' if self._stopped else lost or 'running'}>"

    def _bring_up(self) -> None:
        r = self._request
        self._processes = Processes(self.size, r["engines"], r["threads"], r["job"])
        self._submitted = self._processes.submitted
        try:
            self._processes.start(self._start_timeout_s)
            self.view = self._processes.client.direct_view(list(range(self.size)))
            self.view.block = True
            self._join(fresh=False)
        except BaseException as error:
            self._tear_down()
            if type(error) is KeyboardInterrupt:
                raise RanksInterrupted(
                    "the ranks had not started; what was started for them has been ended"
                ) from None
            raise
        self._lost = ""

    def _join(self, *, fresh: bool) -> None:
        """Join all ranks to a new process group at a new store, independent of older groups."""
        r = self._request
        if self._processes.remote:
            first = self._processes.client.direct_view([0])
            (rendezvous,) = self._finish(first.apply_async(engine.offer_store, r["timeout_s"]))
        else:
            # In the cluster's own folder, which nobody else can enter.
            rendezvous = {STORE: str(self._processes.folder / f"store-{uuid.uuid4().hex}")}
        how = (r["device"], r["timeout_s"], sys.path, fresh)
        self.info = self._finish(self.view.apply_async(engine.join, rendezvous, self.size, *how))
        assert [info["rank"] for info in self.info] == list(range(self.size)), (
            "an engine has another id than its rank"
        )
        self._processes.pids = {info["pid"]: info["rank"] for info in self.info}
        self._must_join = False

    def _renew(self, size: int, request: dict) -> bool:
        if self._stopped or self._lost or size != self.size or request != self._request:
            return False
        try:
            self._raise_if_dead()
            self._join(fresh=True)
        except RankError:
            return False
        return True

    def _ready(self) -> None:
        """Called before every use: rejoin or restart the ranks after an error or a Stop."""
        if self._stopped:
            raise ClusterError(
                f"these ranks were stopped: ranks = cluster.start({self.size}) starts new ones"
            )
        if self._lost and self._submitted:
            raise ClusterError(
                f"{self._lost}; their job has ended: cluster.start({self.size}, ...) submits "
                "another"
            )
        if self._lost:
            began, why = time.monotonic(), self._lost
            self._bring_up()
            note = f"restarted, because {why}; their variables are lost"
            self._greet(time.monotonic() - began, note)
        else:
            self._raise_if_dead()
            if self._must_join:
                self._join(fresh=False)

    def _greet(self, seconds: float, note: str = "") -> None:
        threads, backend = self.info[0]["threads"], self.info[0]["backend"]
        hosts = list(dict.fromkeys(info["host"] for info in self.info))
        where = ", ".join(hosts[:4]) + f" and {len(hosts) - 4} more" * (len(hosts) > 4)
        line = f"{self.size} rank{'s' * (self.size > 1)} on {where} in {seconds:.1f} s"
        print(
            f"{line} ({backend}, {threads} thread{'s' * (threads > 1)} each)"
            + (f"; {note}" if note else "")
        )

    def _tear_down(self) -> None:
        if self._processes is not None:
            self._processes.stop()
            self._processes = None

    def _finish(self, asked, *, show: bool = False) -> list:
        """Wait for an AsyncResult, showing output; returns results in rank order, or raises."""
        ranks = [int(target) for target in asked._targets]
        pending = cells.Pending(dict(zip(ranks, asked._children, strict=True)))
        output = cells.Output(ranks, asked._children) if show else None
        try:
            self._wait(pending, output)
        finally:
            if output:
                pending.await_output(lambda: bool(self._lost or self._processes.exits()))
                output.finish()
        return [child.result() for child in asked._children]

    def _wait(self, pending: cells.Pending, output: cells.Output | None) -> None:
        def tick() -> None:
            self._raise_if_dead()
            if output:
                output.refresh()

        try:
            pending.wait(None, tick, until_failure=True)
            if not pending.failures():
                return
            pending.wait(GRACE_S, tick)
            failures, until = pending.failures(), time.monotonic() + ANSWER_S
            gone = any(failure.name == "EngineError" for failure in failures)
            while gone and time.monotonic() < until:
                self._raise_if_dead()  # ipyparallel was told earlier than we
                time.sleep(0.1)
            note = self._interrupt(pending) if pending.ranks() else ""
        except KeyboardInterrupt:
            raise RanksInterrupted(self._interrupt(pending) or "all ranks had finished") from None
        broken = any(
            word in f"{f.name} {f.message}".lower() for f in failures for word in _BROKEN_GROUP
        )
        if broken and not self._lost:
            self._must_join = True
        raise RankError.of(failures, note)

    def _interrupt(self, pending: cells.Pending) -> str:
        busy = pending.ranks()
        if not busy:
            return ""
        try:
            self._processes.signal(busy, signal.SIGINT)
            if not pending.wait(SIGNAL_ANSWER_S):
                client, waiting = self._processes.client, pending.ranks()
                if free := [rank for rank in client.ids if rank not in waiting]:
                    # They leave the process group.
                    client.direct_view(free).apply_async(engine.leave)
                pending.wait(ANSWER_S)
        except KeyboardInterrupt:  # Stop pressed again
            pass
        if deaf := pending.ranks():
            self._raise_if_dead()  # on a busy machine a dead rank may be seen late
            self._lost = f"{name_ranks(deaf)} did not answer and had to be killed"
            self._tear_down()
            following = (
                "their job has ended" if self._submitted else "the next cell starts new ranks"
            )
            return f"{self._lost}; {following}, without their variables"
        self._must_join = True
        return (
            f"{name_ranks(busy)} interrupted; the next cell joins all ranks to a new process group"
        )

    def _raise_if_dead(self) -> None:
        if not (ends := self._processes.exits()):
            return
        log, self._lost = self._processes.log(ends[0].log), ends[0].message
        self._tear_down()
        memory = " (if nobody killed it, memory ran out)" if "(signal 9)" in self._lost else ""
        raise RankDied(
            f"{self._lost}{memory}; no rank is left: cluster.start({self.size}) starts new ones",
            log,
        )
