"""Data parallelism by hand with mpi4py.

Rank 0's parameters are broadcast once; before each update the gradients are packed into one buffer, summed by one
Allreduce and divided. One large message pays MPI's latency only once.

Needs a job that MPI started: `mpiexec -n 4 python -m aiscale train --recipe laptop --set parallel.strategy=mpi`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aiscale.config import ConfigError, Run
from aiscale.distributed import Launch, World, end_job_on_uncaught_error, mpi_world
from aiscale.distributed.counter import Group
from aiscale.parallel.serial import Engine


class MPIEngine(Engine):
    """The whole model on every rank, gradients averaged through one MPI Allreduce a step."""

    def __init__(self, run: Run, world: World) -> None:
        if world.launcher not in ("mpiexec", "srun"):
            raise ConfigError(
                f"parallel.strategy mpi needs ranks that MPI started, but these came from {world.launcher}: "
                "run it as mpiexec -n N python -m aiscale train ..., or use parallel.strategy=ddp"
            )
        super().__init__(run, world)
        end_job_on_uncaught_error()
        self.comm = mpi_world(Launch(launcher=world.launcher, rank=world.rank, size=world.size))
        self.buffer = torch.cat([p.detach().reshape(-1) for p in self.model.parameters()]).cpu()
        self.comm.Bcast(self.buffer.numpy(), root=0)
        self._scatter([p.data for p in self.model.parameters()])

    def _average_gradients(self) -> None:
        from mpi4py import MPI

        gradients = [p.grad for p in self.model.parameters()]
        self.buffer.copy_(torch.cat([g.reshape(-1) for g in gradients]))
        traffic, sent_bytes = self.world.traffic, self.buffer.numel() * self.buffer.element_size()
        traffic.progress.begin("all_reduce", Group("world", tuple(range(self.world.size))).label, sent_bytes)
        self.comm.Allreduce(MPI.IN_PLACE, self.buffer.numpy(), op=MPI.SUM)  # numpy: the same memory
        traffic.add("all_reduce", self.world.size, sent_bytes)
        self.buffer /= self.world.size
        self._scatter(gradients)

    @torch.no_grad()
    def _scatter(self, tensors: list[Tensor]) -> None:
        """Copy consecutive pieces of the buffer back into `tensors`."""
        for tensor, piece in zip(tensors, self.buffer.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(piece.view_as(tensor))
