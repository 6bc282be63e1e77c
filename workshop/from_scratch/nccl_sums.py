"""Stage 3 with NCCL: gradients are added up from GPU to GPU, and none of them crosses to the host.

mpiexec -n 2 python -m from_scratch.train --device gpu --sums nccl

MPI still starts the ranks, hands out corpus and first parameters, and averages the loss that is printed. NCCL needs a
GPU for each rank, and nccl4py: pip install 'nccl4py[cu13]'. No GPU has run this yet: the test gives it a stand-in for
nccl4py whose sums are MPI's.
"""

import sys

from .mpi import Ranks

try:
    import nccl.core as nccl
except ImportError:
    sys.exit("--sums nccl needs nccl4py, which is not installed: pip install 'nccl4py[cu13]', or --sums mpi")


class NcclRanks(Ranks):
    def __init__(self, MPI):
        super().__init__(MPI)
        unique_id = self.broadcast(nccl.get_unique_id)  # by which the ranks of a communicator find each other
        self.nccl = nccl.Communicator.init(nranks=self.size, rank=self.rank, unique_id=unique_id)

    def backward(self, loss, parameters, overlap):
        """Gradients of the whole batch on every rank, in place. The GPU orders this before Adam's kernels."""
        loss.backward()
        with nccl.group():  # all tensors in one launch
            for w in parameters.values():
                self.nccl.allreduce(w.grad, w.grad, nccl.AVG)
