"""The ladder: every strategy, started for real, must give the losses and the weights of the serial run."""

from aiscale.verify.ladder import Verdict, climb, table
from aiscale.verify.rungs import RUNGS, Rung

__all__ = ["RUNGS", "Rung", "Verdict", "climb", "table"]
