"""Real ranks under a notebook: `ranks = cluster.start(4)`, then `%%px` cells run on every rank."""

from aiscale.cluster.errors import ClusterError, RankDied, RankError, RanksInterrupted
from aiscale.cluster.ranks import Ranks, current, start, stop
