"""Real ranks under a notebook: `ranks = cluster.start(4)`, then `%%px` cells run on every rank.

See `aiscale.cluster.ranks` for the calls, `magics` for the flags of `%%px`, `processes` for what is started, `slurm`
and `job` for ranks in a batch job.
"""

from aiscale.cluster.errors import ClusterError, RankDied, RankError, RanksInterrupted
from aiscale.cluster.ranks import Ranks, start, stop

__all__ = ["ClusterError", "RankDied", "RankError", "Ranks", "RanksInterrupted", "start", "stop"]
