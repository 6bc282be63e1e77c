"""What one rank has seen so far: the watchers write here, and `probe` saves it.

A step begins with the first call of a model after an optimizer's step. The weights of a step are
read then: DeepSpeed and ZeRO gather them only after the optimizer has returned."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from aiscale.measure.referee import trace

#: Parts of names that wrappers add.
_WRAPPERS = ("module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")


def clean(name: str) -> str:
    """The name of a module or parameter without its wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_deferred(tensor: torch.Tensor) -> bool:
    """Whether it has no values here: ZeRO-3 keeps a parameter elsewhere until it is used, meta has
    none at all."""
    return not tensor.numel() or tensor.is_meta


class Recorder:
    """The trace of this rank while it grows."""

    def __init__(self, folder: Path, rank: int, steps: int, bare=False, noise=False):
        self.folder, self.rank, self.wanted = folder, rank, steps
        self.bare = bare  #: only losses and digests: to see whether watching more changes anything
        #: In the reference with rounding noise: a source of noise.
        self.noise = torch.Generator().manual_seed(7) if noise else None
        #: Weights to begin with instead of the script's own.
        self.given_weights: dict | None = None
        self.steps: list[dict] = []
        self.roots: set[int] = set()  #: ids of the modules that the training loop calls
        self.names: dict[int, str] = {}  #: id of a parameter -> its name
        self.modules: dict[int, str] = {}  #: id of a module -> its name
        self.parameters: list[tuple[str, torch.Tensor]] = []
        self.buffers: list[tuple[str, torch.Tensor]] = []
        self.alive: list[object] = []  #: an id says who it is only as long as its owner lives
        self.tied: list[list[str]] = []
        self.losses: list[float] = []  #: in the order of backward passes
        self.digests: list[str] = []  #: of the weights after each optimizer step
        self.unseen: set[str] = set()  #: optimizers whose tensors are no parameters of a model
        self.notes: set[str] = set()
        self.orders: list[tuple[int, str]] = []  #: (length, digest) of what torch.randperm drew
        self.batches: list | None = None  #: (epoch, batch) that DataLoaders have yielded
        self.stepped = False
        self.connected = False  #: whether ranks have a process group when they learn
        self.traffic = contextlib.ExitStack()  #: closed when the trace is made
        self.sent: dict = {}
        self._saving = threading.Lock()
        self._saved = False
        self._new_step()

    @property
    def step(self) -> dict:
        return self.steps[-1]

    def _new_step(self) -> None:
        self.steps.append(trace.empty_step())

    def model_called(self) -> None:
        """A model is called: after an optimizer's step this begins the next step."""
        if self.stepped:
            self._new_step()
            self.stepped = False
        if not self.step["weights"]:
            self.weigh()
            self.step["generators"] = generators()

    def weigh(self) -> None:
        for name, tensor in self.parameters:
            if not is_deferred(tensor):
                self.step["weights"][name] = trace.piece(tensor)
        for name, tensor in self.buffers:
            if tensor.is_floating_point() and not is_deferred(tensor):
                self.step["buffers"][name] = trace.piece(tensor)

    def with_rounding(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with an error in each entry as large as rounding may make."""
        noise = torch.randn(tensor.shape, generator=self.noise).to(tensor)
        return tensor * (1 + torch.finfo(tensor.dtype).eps * noise)

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.stepped = not self.bare
        self.connected = self.connected or dist.is_initialized()
        digest = hashlib.sha1()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                digest.update(trace.bytes_of(local))
        self.digests.append(digest.hexdigest())

    def seen_enough(self) -> bool:
        """Asked before an optimizer's step: all ranks come here, and none waits for another one."""
        done = len(self.digests) if self.bare else len(self.steps) - 1
        return done >= self.wanted and not self.stepped

    def finish(self, why: str, status: int | None) -> None:
        """Save the trace once. With a status, leave after all ranks have saved.

        A rank that ends first breaks the connections of the others."""
        with self._saving:  # the script must not end while `probe` saves
            if self._saved:
                return
            self._save(why)
            self._saved = True
        if status is None:
            return
        size = (
            dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
        )
        while not self._all_are_done(size):
            time.sleep(0.05)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _save(self, why: str) -> None:
        trace.save(self.folder / f"rank{self.rank}.pt", self.trace(why))
        if self.batches:
            trace.save(self.folder / f"batches{self.rank}.pt", self.batches)
        (self.folder / f"done{self.rank}").touch()

    def _all_are_done(self, size: int) -> bool:
        return all((self.folder / f"done{rank}").exists() for rank in range(size))

    def trace(self, why: str) -> dict:
        if (
            self.stepped and self.parameters
        ):  # the script has ended: its last weights belong to a step of their own
            self._new_step()
            self.weigh()
        self.traffic.close()
        libraries = ("torch.distributed.pipelining", "deepspeed", "megatron.core")
        return {
            "rank": self.rank,
            "ended": why,
            "steps": self.steps,
            "modules": sorted(set(self.modules.values())),
            "tied": self.tied,
            "losses": self.losses,
            "digests": self.digests,
            "connected": self.connected,
            "unseen": sorted(self.unseen),
            "notes": sorted(self.notes),
            "orders": self.orders,
            "traffic": {operation: count.payload_bytes for operation, count in self.sent.items()},
            "libraries": [name for name in libraries if name in sys.modules],
        }


def generators() -> dict[str, str]:
    """Digests of the states from which random numbers are drawn."""
    states = {"torch": trace.bytes_of(torch.get_rng_state()), "random": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state(legacy=True)[1:3]
    found = {}
    for name, state in states.items():
        found[name] = hashlib.sha1(state if isinstance(state, bytes) else repr(state).encode())
    return {name: digest.hexdigest()[:12] for name, digest in found.items()}


def seed(rank: int) -> None:
    """A script that sets no seed draws the same numbers in each run; other numbers on each rank, as
    without us."""
    torch.manual_seed(1000 + rank)
    random.seed(1000 + rank)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(1000 + rank)
