"""Joining processes: who am I, who are the others, and what passes between us.

world = connect()                     # under torchrun, srun, mpiexec, in a notebook's engine, or alone
world.rank, world.size, world.device
world.traffic.snapshot()              # bytes by collective since the start

environment, rendezvous, connect   ranks know who they are and find each other; nobody else can connect to their ports
counter, wire, flight              what they send is counted, over gloo and over NCCL
link                               a slow link can be emulated
failing, hangs                     a failure is said once; a hang is named, and ends the job
spawn, forking                     ranks of this machine start at once, and none outlives its launcher
"""

from aiscale.distributed.connect import RankError, World, connect
from aiscale.distributed.counter import Traffic
from aiscale.distributed.environment import ConnectError, Launch, find_launch, mpi_world
from aiscale.distributed.failing import (
    HANG_STATUS,
    LOST_STATUS,
    alike,
    end_job_on_uncaught_error,
    end_now,
    failed_alike,
    lost_another_rank,
)
from aiscale.distributed.hangs import watching
from aiscale.distributed.rendezvous import host_store
from aiscale.distributed.spawn import launch, rank_environment

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
    "end_job_on_uncaught_error",
    "end_now",
    "failed_alike",
    "find_launch",
    "host_store",
    "launch",
    "lost_another_rank",
    "mpi_world",
    "rank_environment",
    "watching",
]
