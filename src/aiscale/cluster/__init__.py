"""Real ranks under a notebook: `ranks = cluster.start(4)`, then `%%px` cells run on every rank.

ranks.py       the calls: start, stop, variables, and when ranks are joined, reused or started again
cells.py       what happens to a cell: sent, waited for, interrupted, shown in rank order; the flags of `%%px`
errors.py      what a rank raised, by rank number and with its own traceback
processes.py   what is started for a cluster, and that it ends with the kernel
local.py       ranks and controller on this machine, also under mpiexec
slurm.py, job.py, queue.py   ranks in a batch job: how they start, what is submitted, what Slurm says of it
engine.py      the process of a rank
guard.py       what cleans up after a kernel that was killed
"""

from aiscale.cluster.errors import ClusterError, RankDied, RankError, RanksInterrupted
from aiscale.cluster.ranks import Ranks, start, stop

__all__ = ["ClusterError", "RankDied", "RankError", "Ranks", "RanksInterrupted", "start", "stop"]
