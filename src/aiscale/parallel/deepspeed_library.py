"""Living with DeepSpeed as a library: imported for one device, silent, and without memory of a world that was closed.

deepspeed = import_deepspeed(world.device)
with calling(world):
    engine, *_ = deepspeed.initialize(...)
forget_groups()
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from aiscale.checkpoint import flush
from aiscale.checkpoint.staging import Staging
from aiscale.distributed import World


def import_deepspeed(device: torch.device):
    """DeepSpeed, told which device it is for before it looks for itself."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    with quiet():
        deepspeed = importlib.import_module("deepspeed")
        from deepspeed.accelerator import get_accelerator, set_accelerator

        if get_accelerator().device_name() != device.type:  # an earlier engine was for the other one
            name = {"cpu": "CPU", "cuda": "CUDA"}[device.type]
            module = importlib.import_module(f"deepspeed.accelerator.{device.type}_accelerator")
            set_accelerator(getattr(module, f"{name}_Accelerator")())
    for handler in logging.getLogger("DeepSpeed").handlers:
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)  # it writes to standard output, where results go
    # Its all-reduce through shared memory is compiled at first use: a minute, or a crash where there is no compiler.
    # Put in place unasked: asked for, this table makes DeepSpeed try the compiler on every operation that it has.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    forget_groups()
    return deepspeed


def forget_groups() -> None:
    """DeepSpeed keeps its process groups in modules; those of a world that was closed would be used again."""
    import deepspeed.comm.comm as comm
    from deepspeed.utils import groups

    comm.cdb = None
    groups._WORLD_GROUP = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = groups._DATA_PARALLEL_GROUP = None
    groups.mesh_device = None
    groups._ALL_TO_ALL_GROUP.clear()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without DeepSpeed's log below errors, its prints, and torch's notes on the names that DeepSpeed calls."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


class DelayedFiles:
    """In the place of DeepSpeed's checkpoint engine: what it is told to save is written, and flushed, when asked for.

    With `staging` it is copied until then; without, nothing may change."""

    def __init__(self, real, staging: Staging | None) -> None:
        self.real, self.staging = real, staging
        self._writing: list[Callable[[], None]] = []

    def __getattr__(self, name: str):
        return getattr(self.real, name)

    def save(self, state_dict: dict, path: str) -> None:
        """Take the content of one file."""
        content = self.staging.of(state_dict, part=Path(path).name) if self.staging else state_dict

        def write() -> None:
            self.real.save(content, path)
            flush(Path(path))

        self._writing.append(write)

    def write(self) -> None:
        """Write the files, from any thread."""
        for each in self._writing:
            each()


@contextlib.contextmanager
def calling(world: World) -> Iterator[None]:
    """Around every call of DeepSpeed's engine: quiet, and with the LOCAL_RANK that it reads as it goes along.

    It takes its GPU from there; a process alone has none, and where each rank sees one GPU only, ours is another.
    """
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(world.device.index if world.device.type == "cuda" else world.local_rank)
    try:
        with quiet():
            yield
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before
