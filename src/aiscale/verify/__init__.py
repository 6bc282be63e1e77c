"""The ladder: runs every strategy and compares its losses and weights with the serial run's."""

from aiscale.verify.ladder import Verdict, choose, climb, table
from aiscale.verify.rungs import RUNGS, Rung
