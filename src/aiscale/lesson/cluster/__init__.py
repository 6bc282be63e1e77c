"""Real ranks under a notebook: `ranks = cluster.start(4)`, then `%%px` cells run on every rank."""

from aiscale.lesson.cluster.errors import ClusterError, RankDied, RankError, RanksInterrupted
from aiscale.lesson.cluster.ranks import Ranks, current, start, stop
