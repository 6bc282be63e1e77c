"""Real ranks under a notebook: `ranks = cluster.start(4)`, then `%%px` cells run on every rank.

ranks.py       start, stop, variables; joins, interrupts, reuses and restarts ranks
cells.py       the `%%px` magics: send a cell, wait, show output in rank order
errors.py      what a rank raised, with its own traceback
processes.py   all processes of a cluster
local.py       ranks and controller on this machine
slurm.py       ranks in a batch job, which is submitted for them
engine.py      the process of a rank
guard.py       the cleaner, for a kernel that was killed
"""

from aiscale.cluster.errors import ClusterError, RankDied, RankError, RanksInterrupted
from aiscale.cluster.ranks import Ranks, current, start, stop
