"""Which rank this process is, on which device, and how all ranks meet."""

from __future__ import annotations

import os
import signal
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from aiscale.train.layout import misfit
from aiscale.train.record import other_job, other_training
from aiscale.train.refusal import refuse
from aiscale.train.sharded_checkpoint import gather
from aiscale.train.watch import watch

#: (rank, world size, local rank): of mpiexec (Open MPI, MPICH), which a job of Slurm may start, and
#: of srun. A batch script has SLURM_PROCID too, but starts no ranks.
LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


def find_rank():
    """(rank, world size, local rank): of torchrun, `aiscale train`, mpiexec or srun, or alone."""
    env = os.environ
    if "RANK" in env:
        return int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0))
    for names in LAUNCHERS:
        if all(name in env for name in names):
            # Libraries read torchrun's names.
            env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"] = (env[name] for name in names)
            return find_rank()
    return 0, 1, 0


rank, world_size, local_rank = find_rank()
device = torch.device("cpu")
if torch.cuda.is_available():  # the n-th rank of a node has its n-th GPU, or the only one it sees
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)

told = []  #: the signals that have come


def note_signal(number, frame):
    if number == signal.SIGINT and number in told:  # a second Ctrl-C does not wait for a step
        raise KeyboardInterrupt
    told.append(number)


for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
    signal.signal(number, note_signal)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # see __init__.py


def start(args):
    """Checks settings, then waits for all ranks; NCCL between GPUs, gloo between CPUs."""
    reason = misfit(args, world_size)
    if reason:
        refuse(reason)
    if args.fp64:
        torch.set_default_dtype(torch.float64)
    connect(args)
    if world_size > 1:
        watch(args.patience)
    reason = None
    if rank == 0:
        reason = other_training(args, world_size) or other_job(args)
    agree(reason)


def agree(reason):
    """Ends all ranks if rank 0 has a reason to."""
    reason = gather(reason)[0]
    if reason:
        refuse(reason)


def connect(args):
    """The meeting of all ranks."""
    # The watch speaks before the backend gives up: it knows which rank is missing.
    timeout = timedelta(seconds=max(300.0, args.patience + 120))
    if world_size == 1:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    place = {"rank": rank, "world_size": world_size, "timeout": timeout}
    store = os.environ.get("AISCALE_STORE")
    if store:  # a file in a folder of this user alone: all ranks are on this machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        step = os.environ.get("SLURM_STEP_ID", "0")
        dist.init_process_group(init_method=f"file://{store}.{step}", **place)
    elif os.environ.get("SLURM_STEP_NUM_NODES") == "1" and "TORCHELASTIC_RUN_ID" not in os.environ:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(store=store_of_one_node(timeout), **place)
    else:  # torchrun's store, or MASTER_ADDR and MASTER_PORT of a launcher
        dist.init_process_group(init_method="env://", **place)


def store_of_one_node(timeout):
    """Where ranks of one node meet under srun. By itself torch would listen on all networks."""
    address = "127.0.0.1", int(os.environ.get("MASTER_PORT", 29500))
    listening = {}
    if rank == 0:
        listening["master_listen_fd"] = socket.create_server(address, backlog=1024).detach()
    return dist.TCPStore(
        *address, world_size, rank == 0, timeout=timeout, wait_for_workers=False, **listening
    )
