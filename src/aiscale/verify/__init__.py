"""Runs every strategy and compares its losses and weights with the serial run's."""

from aiscale.verify.cases import CASES, Case
from aiscale.verify.jobs import choose, verify
