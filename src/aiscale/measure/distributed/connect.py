"""`connect()` joins ranks started together, on any device, or says in one line why it cannot.

world = connect()
result = world.together(make)    # or from_rank0(make): an error on one rank is raised on all
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from aiscale.measure.distributed import rendezvous, wire
from aiscale.measure.distributed.counter import Traffic
from aiscale.measure.distributed.failing import alike, end_job_on_uncaught_error, lost_another_rank
from aiscale.measure.distributed.link import Link
from aiscale.measure.distributed.rendezvous import ConnectError, Launch, find_launch
from aiscale.private import STORE


class PeerError(RuntimeError):
    """Something failed on some ranks only; the message is one line that names them."""


@dataclass
class World:
    """This process's place among the ranks that train together."""

    rank: int
    size: int
    local_rank: int  #: among the ranks of this node
    device: torch.device
    launcher: str  #: torchrun, aiscale, ipyparallel, srun, mpiexec or none
    backend: str  #: gloo or nccl
    traffic: Traffic  #: bytes by collective
    link: Link = field(default_factory=Link)  #: to the other ranks; may be slowed
    #: (host, process id) of every rank
    processes: list[tuple[str, int]] = field(default_factory=list)
    store: dist.Store | None = field(default=None, repr=False)  #: the rendezvous store

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def mesh(self, **axes: int) -> DeviceMesh:
        """Arrange the ranks on a grid, as in `mesh(dp=2, tp=2)`; the last axis varies fastest."""
        with _greetings_aside():
            return init_device_mesh(
                self.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes)
            )

    def control(self) -> AbstractContextManager[None]:
        """Traffic inside is bookkeeping and is not counted as training traffic."""
        return self.traffic.control()

    def barrier(self) -> None:
        # NCCL would guess the device from the rank, and hang if the guess is wrong.
        devices = [self.device.index] if self.backend == "nccl" else None
        with self.control():
            dist.barrier(device_ids=devices)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank.

        It travels as JSON: tuples come back as lists, and nothing that a stranger could send is
        run, as it is when torch unpickles objects.
        """
        if self.size == 1:
            return [value]
        with self.control():
            return [json.loads(text) for text in _all_gather_text(json.dumps(value))]

    def together(self, make: Callable[[], Any]) -> Any:
        """Run `make` on every rank; where it fails on some, raise PeerError on all: none waits."""
        if self.size == 1:
            return make()
        result, failure = None, None
        try:
            result = make()
        except Exception as error:
            failure = error
        failures = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        failed = [rank for rank, text in enumerate(failures) if text]
        if not failed:
            return result
        if len(failed) == self.size:
            raise alike(failure)
        ranks = ", ".join(map(str, failed))
        alone = PeerError(f"rank {ranks} of {self.size} failed alone: {failures[failed[0]]}")
        raise alike(alone) from failure

    def from_rank0(self, make: Callable[[], Any]) -> Any:
        """Run `make` on rank 0 and give its result, or its exception, to every rank."""
        if self.size == 1:
            return make()
        answer: dict[str, Any] = {}
        if self.is_main:
            try:
                answer = {"result": make()}
                json.dumps(answer)
            except Exception as error:  # raise it on every rank, or the others hang
                answer = _portable(error)
        with self.control():
            answer = json.loads(_broadcast_text(json.dumps(answer)))
        if "error" in answer:
            raise alike(_rebuilt(answer))
        return answer["result"]

    def any(self, flag: bool) -> bool:
        return bool(self.sum(float(flag)))

    def sum(self, value: float) -> float:
        """The sum of one number over all ranks, in fp64."""
        if self.size == 1:
            return value
        total = torch.tensor([value], dtype=torch.float64, device=self.device)
        with self.control():
            dist.all_reduce(total)
        return total.item()

    def gone(self, timeout_s: float = 1.0) -> list[int]:
        """The ranks on this host whose process has ended; waits up to `timeout_s` for the first."""
        host, deadline = socket.gethostname(), time.monotonic() + timeout_s
        here = [(rank, pid) for rank, (where, pid) in enumerate(self.processes) if where == host]
        # A dying process closes its connections a moment before it ends.
        while (
            not (ended := [rank for rank, pid in here if _has_ended(pid)])
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        return ended

    def failed_alike(self, error: BaseException, timeout_s: float = 5.0) -> bool:
        """Whether all ranks call this within `timeout_s`.

        Then none has to be ended, and rank 0 may report for all. An error marked by `alike` answers
        at once.
        """
        if self.size == 1 or getattr(error, "failed_alike", False):
            return True
        if lost_another_rank(error) or self.store is None:
            return False
        deadline = time.monotonic() + timeout_s
        try:
            failed = self.store.add("aiscale/failed", 1)
            while failed < self.size and time.monotonic() < deadline:
                time.sleep(0.05)
                failed = self.store.add("aiscale/failed", 0)
            return failed >= self.size
        except RuntimeError:
            # the store lives in rank 0, which leaves early only when it has seen that all failed
            return True

    def close(self) -> None:
        """Destroy the process group. A second call does nothing."""
        if dist.is_initialized():
            dist.destroy_process_group()
            # gloo's threads release the last message's tensors a moment after reporting it. If
            # Python ends in that moment while a DDP module still holds the group, it aborts
            # ("terminate called ...").
            time.sleep(0.2 if self.size > 1 else 0)


def connect(device: str = "auto", timeout_s: float = 300.0, *, backend: str = "auto") -> World:
    """Join the ranks that were started with this one; without a launcher, return a world of one.

    `device` is auto (a GPU if there is one), cpu or cuda. `backend` is auto (NCCL between GPUs,
    else gloo) or gloo, with which several ranks may share a GPU, slowly. A second call leaves the
    old world. Raises ConnectError.
    """
    place = find_launch(os.environ)
    if dist.is_initialized():
        dist.destroy_process_group()
    here = pick_device(device, place, shared=backend == "gloo")
    nccl = here.type == "cuda" and backend != "gloo"
    refusal = "between GPUs NCCL's links are real: do not slow them, or connect(backend='gloo')"
    link = Link(refusal if nccl else "")
    metered = wire.backend_for(traffic := Traffic(), link, nccl=nccl)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    with _greetings_aside():
        store = _init_process_group(metered, place, timeout_s)
    backend = "nccl" if nccl else "gloo"
    world = World(
        place.rank,
        place.size,
        place.local_rank,
        here,
        place.launcher,
        backend,
        traffic,
        link,
        store=store,
    )
    if place.launcher == "mpiexec" and place.size > 1:
        # after torch, whose own hook delays what the earlier hook prints
        end_job_on_uncaught_error()
    world.processes = world.gather((socket.gethostname(), os.getpid()))
    return world


@contextmanager
def _greetings_aside() -> Iterator[None]:
    """Send what gloo up to torch 2.12 prints on stdout to stderr; C++ bypasses sys.stdout."""
    sys.stdout.flush()
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(out, 1)
        os.close(out)


def _has_ended(pid: int) -> bool:
    import psutil  # not needed to count traffic, which works with torch alone

    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# Text goes over the CPU: every group has a gloo backend there.


def _broadcast_text(text: str) -> str:
    """Rank 0's text."""
    sent = _as_tensor(text)
    length = torch.tensor([len(sent)])
    dist.broadcast(length, src=0)
    if dist.get_rank() != 0:
        sent = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(sent, src=0)
    return _as_text(sent)


def _all_gather_text(text: str) -> list[str]:
    """Every rank's text."""
    mine = _as_tensor(text)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(mine)]))
    longest = max(int(length) for length in lengths)
    padded = torch.nn.functional.pad(mine, (0, longest - len(mine)))
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return [_as_text(part[:length]) for part, length in zip(parts, lengths, strict=True)]


def _as_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _as_text(tensor: torch.Tensor) -> str:
    return tensor.numpy().tobytes().decode()


def _portable(error: Exception) -> dict[str, Any]:
    """An exception as JSON: its class by name, and what makes it."""
    arguments = error.__reduce__()[1]
    told = {"error": type(error).__name__, "text": str(error), "arguments": arguments}
    try:
        json.dumps(told)
    except TypeError:
        told["arguments"] = None
    return told


def _rebuilt(told: dict[str, Any]) -> Exception:
    """The exception of `_portable`, if its class is known here, or a PeerError with its text."""
    unknown = PeerError(f"rank 0 failed: {told['error']}: {told['text']}")
    classes = [Exception]
    for each in classes:
        classes += each.__subclasses__()
    kind = next((each for each in classes if each.__name__ == told["error"]), None)
    if kind is None or told["arguments"] is None:
        return unknown
    try:
        error = kind(*told["arguments"])
    except Exception:
        return unknown
    return error if str(error) == told["text"] else unknown


def pick_device(device: str, place: Launch, shared: bool = False) -> torch.device:
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConnectError(
            "device is cuda, but torch sees no GPU here: take auto, or check the driver"
        )
    count = torch.cuda.device_count()
    if shared or count >= place.local_size:
        return torch.device("cuda", place.local_rank % count)
    # Under --gpus-per-task=1, or a wrapper that sets CUDA_VISIBLE_DEVICES, every rank sees its own
    # device only.
    if count == 1 and (device == "cuda" or place.launcher == "srun"):
        return torch.device("cuda", 0)
    if device == "cuda":
        raise ConnectError(
            f"{place.local_size} ranks on this node, but torch sees {count} GPUs: start {count} "
            "ranks a node, or share them by backend='gloo', or take the CPU"
        )
    return torch.device("cpu")


def _init_process_group(backend: str, place: Launch, timeout_s: float) -> dist.Store:
    address = "this process"
    alone = place.size == 1 and place.launcher in ("none", "srun", "mpiexec")
    if alone:
        rendezvous.choose_gloo_interface(rendezvous.LOOPBACK)
    else:
        where = rendezvous.meeting_point(place)
        # DeepSpeed and others read these; AISCALE_LAUNCHER keeps the launcher's name for another
        # connect().
        settings = {"RANK": place.rank, "WORLD_SIZE": place.size}
        settings |= {"LOCAL_RANK": place.local_rank, "LOCAL_WORLD_SIZE": place.local_size}
        if isinstance(where, Path):
            host, address = rendezvous.LOOPBACK, str(where)
            settings[STORE] = where
        else:
            host, port = where
            address = f"{host}:{port}"
            settings |= {"MASTER_ADDR": host, "MASTER_PORT": port}
        os.environ.update(
            {key: str(value) for key, value in settings.items()}, AISCALE_LAUNCHER=place.launcher
        )
        rendezvous.choose_gloo_interface(host)
    try:
        store = dist.HashStore() if alone else rendezvous.join_store(where, place, timeout_s)
        timeout = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout
        )
        return store
    except (RuntimeError, ValueError, OSError) as error:
        raise ConnectError(_explain(error, place, address, timeout_s)) from error


def _explain(error: Exception, place: Launch, address: str, timeout_s: float) -> str:
    text = " ".join(str(error).split())
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return f"{address} is already in use by another process: set MASTER_PORT to a free port"
    if (
        isinstance(error, dist.DistStoreError)
        or "timed out" in text.lower()
        or "timeout" in text.lower()
    ):
        return (
            f"rank {place.rank} of {place.size} waited {timeout_s:.0f} s at {address} for the "
            "others: check that every rank was started and can reach that address"
        )
    reason = text.partition("Exception raised from")[0].strip()[:300]  # without C++ frames
    return (
        f"rank {place.rank} of {place.size} could not join at {address} ({reason}): "
        "check that rank 0 runs and that no other program listens there, "
        "or set another MASTER_PORT for all ranks"
    )
