"""Radius: sparse steps send the same few entries of each gradient; a dense step now and then chooses new ones."""

from aiscale.parallel.radius.compressor import MaskError, Radius
from aiscale.parallel.radius.reference import SimulatedRanks
