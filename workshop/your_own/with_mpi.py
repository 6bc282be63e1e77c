"""Starts under mpiexec a script that is written for torchrun:

    mpiexec -n 2 python with_mpi.py train_ranks.py --steps 20

Each process asks MPI who it is.
"""

import os
import runpy
import socket
import sys

from mpi4py import MPI


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def setup_distributed_env():
    """Sets what torchrun would set."""
    world = MPI.COMM_WORLD  # all processes that mpiexec has started
    node = world.Split_type(MPI.COMM_TYPE_SHARED)  # those that share this one's memory
    meet = (socket.gethostname(), free_port()) if world.Get_rank() == 0 else None
    address, port = world.bcast(meet)
    os.environ["RANK"] = str(world.Get_rank())
    os.environ["WORLD_SIZE"] = str(world.Get_size())
    os.environ["LOCAL_RANK"] = str(node.Get_rank())
    os.environ["MASTER_ADDR"] = address
    os.environ["MASTER_PORT"] = str(port)


if __name__ == "__main__":
    setup_distributed_env()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
