"""Joining processes: who am I, who are the others, and what passes between us.

world = connect()                     # under torchrun, srun, mpiexec, in a notebook's engine, or alone
world.rank, world.size, world.device
world.traffic.snapshot()              # bytes by collective since the start
"""

from aiscale.distributed.connect import ConnectError, RankError, World, connect
from aiscale.distributed.environment import Launch, find_launch
from aiscale.distributed.failing import HANG_STATUS, LOST_STATUS, alike, end_now, failed_alike, lost_another_rank
from aiscale.distributed.spawn import host_store, launch, rank_environment
from aiscale.distributed.watch import watching
from aiscale.distributed.wire import Traffic

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
