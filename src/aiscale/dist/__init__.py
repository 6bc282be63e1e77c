"""Joining processes: who am I, who are the others, and what passes between us.

world = connect()                     # under torchrun, srun, mpiexec, in a notebook's engine, or alone
world.rank, world.size, world.device
world.traffic.snapshot()              # bytes by collective since the start
"""

from aiscale.dist.connect import ConnectError, RankError, World, connect
from aiscale.dist.failing import HANG_STATUS, LOST_STATUS, alike, end_now, failed_alike, lost_another_rank
from aiscale.dist.launch import host_store, launch, rank_environment
from aiscale.dist.launchers import Launch, find_launch
from aiscale.dist.watch import watching
from aiscale.dist.wire import Traffic

__all__ = [
    "HANG_STATUS",
    "LOST_STATUS",
    "ConnectError",
    "Launch",
    "RankError",
    "Traffic",
    "World",
    "alike",
    "connect",
    "end_now",
    "failed_alike",
    "find_launch",
    "host_store",
    "launch",
    "lost_another_rank",
    "rank_environment",
    "watching",
]
