"""Joining processes: who am I, who are the others, and what passes between us.

world = connect()                     # under torchrun, srun, mpiexec, in a notebook's engine, or alone
world.rank, world.size, world.device
world.traffic.snapshot()              # bytes by collective since the start
"""

from aiscale.dist.connect import ConnectError, World, connect
from aiscale.dist.launch import host_store, launch, rank_environment
from aiscale.dist.launchers import Launch, find_launch
from aiscale.dist.wire import Traffic

__all__ = [
    "ConnectError",
    "Launch",
    "Traffic",
    "World",
    "connect",
    "find_launch",
    "host_store",
    "launch",
    "rank_environment",
]
