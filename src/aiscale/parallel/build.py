"""From the name of a strategy to its engine."""

from __future__ import annotations

from aiscale.config import Run
from aiscale.dist import World
from aiscale.parallel.ddp import DDPEngine
from aiscale.parallel.mpi import MPIEngine
from aiscale.parallel.serial import Engine

ENGINES: dict[str, type[Engine]] = {"serial": Engine, "mpi": MPIEngine, "ddp": DDPEngine}


def build(run: Run, world: World) -> Engine:
    """The engine that trains `run` as one rank of `world`; raises ConfigError when the layout does not fit."""
    run.parallel.data_parallel(world.size)
    return ENGINES[run.parallel.strategy](run, world)
