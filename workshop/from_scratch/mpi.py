"""Stage 1: ranks of MPI. Each computes the gradients of its share of a batch; their mean is the whole batch's."""

import os
import sys
import traceback

import numpy as np

from . import tensor

BUCKET_BYTES = 4 << 20  # gradients travel in messages of about this size while others are computed
STARTED_BY = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID")  # what mpiexec or srun sets


def ranks(sums="mpi"):
    """The ranks that mpiexec or srun started, or the one process that there is. sums: mpi or nccl."""
    if not any(name in os.environ for name in STARTED_BY):
        return OneRank()
    from mpi4py import MPI

    if sums == "nccl":
        from .nccl_sums import NcclRanks

        return NcclRanks(MPI)
    return Ranks(MPI)


class OneRank:
    rank, size = 0, 1

    def barrier(self):
        pass

    def broadcast(self, make):
        return make()

    def broadcast_parameters(self, parameters):
        pass

    def backward(self, loss, parameters, overlap):
        loss.backward()

    def mean(self, number):
        return number

    def gather(self, items):
        return [items]


class Ranks:
    def __init__(self, MPI):
        self.MPI, self.comm = MPI, MPI.COMM_WORLD
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        sys.excepthook = self.abort
        tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
        if self.size == 1 < tasks:
            raise SystemExit(
                f"srun started {tasks} processes, but MPI sees one: mpi4py's MPI must understand what srun tells it. "
                "See `srun --mpi=list`, and export SLURM_MPI_TYPE=NAME (MPICH from PyPI: pmi2)"
            )

    def abort(self, *error):
        """A rank that fails ends all of them: they would wait for its messages."""
        traceback.print_exception(*error)
        self.comm.Abort(1)

    def barrier(self):
        self.comm.Barrier()

    def broadcast(self, make):
        """What rank 0 makes, to all."""
        return self.comm.bcast(make() if self.rank == 0 else None)

    def broadcast_parameters(self, parameters):
        """Rank 0's, in one message."""
        flat = np.concatenate([tensor.device.to_host(w.array).ravel() for w in parameters.values()])
        self.comm.Bcast(flat)
        for w, part in zip(parameters.values(), cut(flat, parameters.values()), strict=True):
            w.array = tensor.device.to_device(part)

    def backward(self, loss, parameters, overlap):
        """Gradients of the whole batch on every rank: in one message at the end, or in several on the way."""
        flat = np.empty(sum(w.array.size for w in parameters.values()), np.float32)
        sums = Sums(self.MPI, flat, BUCKET_BYTES if overlap else flat.nbytes)
        done = []  # in the order in which gradients are complete: all ranks walk the same tape, so they agree on it
        loss.backward(lambda leaf: done.append((leaf, sums.add(tensor.device.to_host(leaf.grad)))))
        sums.wait()
        flat /= self.size
        for w, grad in done:
            w.grad = tensor.device.to_device(grad)

    def mean(self, number):
        return self.comm.allreduce(number) / self.size

    def gather(self, items):
        """Each rank's items, on rank 0; None on the others."""
        return self.comm.gather(items)


class Sums:
    """Sums of a buffer over all ranks, a bucket at a time, each begun as soon as its last gradient is there."""

    def __init__(self, MPI, flat, bucket_bytes):
        self.MPI, self.flat, self.bucket_bytes = MPI, flat, bucket_bytes
        self.begin = self.end = 0
        self.requests = []

    def add(self, array):
        """Puts this rank's array next into the buffer. Returns the place, a view: after wait() it holds the sum."""
        place = self.flat[self.end : self.end + array.size].reshape(array.shape)
        place[...] = array
        self.end += array.size
        bucket = self.flat[self.begin : self.end]
        if bucket.nbytes >= self.bucket_bytes or self.end == self.flat.size:
            self.requests.append(self.MPI.COMM_WORLD.Iallreduce(self.MPI.IN_PLACE, bucket))
            self.begin = self.end
        self.MPI.Request.Testall(self.requests)  # many MPIs move data only while one of their functions runs
        return place

    def wait(self):
        self.MPI.Request.Waitall(self.requests)


def cut(flat, tensors):
    """A piece of the buffer for each tensor, in its shape. They are views: what is written there is in the buffer."""
    end = 0
    for w in tensors:
        begin, end = end, end + w.array.size
        yield flat[begin:end].reshape(w.shape)
