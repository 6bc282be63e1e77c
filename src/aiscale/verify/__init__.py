"""The ladder: every strategy, started for real, must give the losses and the weights of the serial run."""

from aiscale.verify.ladder import RUNGS, Rung, Verdict, climb

__all__ = ["RUNGS", "Rung", "Verdict", "climb"]
