"""DeepSpeed as a library: import it for one device, keep it quiet, and clear its process groups between worlds."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from unittest.mock import patch

import torch

from aiscale.distributed import World


def import_deepspeed(device: torch.device):
    """Import DeepSpeed, with its accelerator set to `device` instead of autodetected."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    with quiet():
        deepspeed = importlib.import_module("deepspeed")
        from deepspeed.accelerator import get_accelerator, set_accelerator

        if get_accelerator().device_name() != device.type:  # an earlier engine used the other device
            module = importlib.import_module(f"deepspeed.accelerator.{device.type}_accelerator")
            set_accelerator(getattr(module, f"{device.type.upper()}_Accelerator")())
    for handler in logging.getLogger("DeepSpeed").handlers:
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)  # by default DeepSpeed logs to stdout, where results go
    # Disable its shared-memory all-reduce, which is compiled at first use: a minute, or a crash without a compiler.
    # Set through vars(): reading this attribute makes DeepSpeed probe the compiler for every operation it has.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    forget_groups()
    return deepspeed


def forget_groups() -> None:
    """Clear the process groups that DeepSpeed caches in modules: the next world must not use those of a closed one."""
    import deepspeed.comm.comm as comm
    from deepspeed.utils import groups

    comm.cdb = None
    groups._WORLD_GROUP = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = groups._DATA_PARALLEL_GROUP = None
    groups.mesh_device = None
    groups._ALL_TO_ALL_GROUP.clear()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence DeepSpeed's log below errors, its prints, and torch's warnings about functions that it calls."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def calling(world: World) -> Iterator[None]:
    """Context for every call of DeepSpeed's engine: quiet, and with the LOCAL_RANK from which it takes its GPU. A
    single process has no LOCAL_RANK, and where each rank sees only one GPU, the launcher's value is wrong."""
    rank = str(world.device.index if world.device.type == "cuda" else world.local_rank)
    with patch.dict(os.environ, LOCAL_RANK=rank), quiet():
        yield
