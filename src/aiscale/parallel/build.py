"""From the name of a strategy to its engine."""

from __future__ import annotations

import importlib
import pkgutil
from contextlib import suppress

from aiscale.config import Run
from aiscale.distributed import World
from aiscale.parallel.serial import Engine

#: strategy -> "module:class", imported when it is asked for: DeepSpeed and Megatron-Core take seconds to import
ENGINES = {
    "serial": "aiscale.parallel.serial:Engine",
    "mpi": "aiscale.parallel.mpi:MPIEngine",
    "ddp": "aiscale.parallel.ddp:DDPEngine",
    "zero": "aiscale.parallel.zero:ZeROEngine",
    "fsdp": "aiscale.parallel.fsdp:FSDPEngine",
    "pipeline": "aiscale.parallel.pipeline:PipelineEngine",
    "megatron": "aiscale.parallel.megatron:MegatronEngine",
}


def build(run: Run, world: World) -> Engine:
    """The engine that trains `run` as one rank of `world`; raises ConfigError when the layout does not fit."""
    run.check_world(world.size)
    engine = pkgutil.resolve_name(ENGINES[run.parallel.strategy])(run, world)
    if run.loop.compile:
        engine.model.compile()  # in place: parameters keep their names, and checkpoints know nothing of it
    return engine


def preload(strategy: str) -> None:
    """Import what `build` will, so that ranks forked from this process need not. A module with more to import than
    its own head names has a function `preload`."""
    importlib.import_module("torch._dynamo")  # the first optimizer does it: half a second of every rank
    with suppress(ImportError):  # build will say what is missing
        module = importlib.import_module(ENGINES[strategy].partition(":")[0])
        getattr(module, "preload", lambda: None)()
