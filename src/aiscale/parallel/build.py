"""Strategy name -> engine: `build(run, world)`."""

from __future__ import annotations

import importlib
import pkgutil
from contextlib import suppress

from aiscale.config import Run
from aiscale.distributed import World
from aiscale.parallel.serial import Engine

#: strategy -> "module:class", imported on demand: DeepSpeed and Megatron-Core take seconds to import
ENGINES = {
    "serial": "aiscale.parallel.serial:Engine",
    "ddp": "aiscale.parallel.ddp:DDPEngine",
    "zero": "aiscale.parallel.zero:ZeROEngine",
    "fsdp": "aiscale.parallel.fsdp:FSDPEngine",
    "pipeline": "aiscale.parallel.pipeline:PipelineEngine",
    "megatron": "aiscale.parallel.megatron:MegatronEngine",
}


def build(run: Run, world: World) -> Engine:
    """The engine of this rank of `world` for `run`; raises ConfigError if the layout does not fit."""
    run.check_world(world.size)
    engine = pkgutil.resolve_name(ENGINES[run.parallel.strategy])(run, world)
    if run.loop.compile:
        engine.model.compile()  # in place, so that parameters keep their names
    return engine


def preload(strategy: str) -> None:
    """Import what `build` will, as `distributed.fake` needs before. A strategy module that imports lazily has its own
    `preload`."""
    importlib.import_module("torch._dynamo")  # else the first optimizer imports it: half a second on every rank
    with suppress(ImportError):  # build reports it
        module = importlib.import_module(ENGINES[strategy].partition(":")[0])
        getattr(module, "preload", lambda: None)()
