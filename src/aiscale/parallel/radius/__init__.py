"""Radius: every step sends the same few entries of each gradient, and now and then all of them choose anew.

mask.py        which entries: scores, the k largest, their neighbours, turns; the same on all ranks
packing.py     the chosen entries out of a bucket and back into it; what is not sent waits in the residual
compressor.py  `Radius`, both together as a communication hook of DDP
reference.py   one process that simulates n ranks with the same pieces
"""

from aiscale.parallel.radius.compressor import MaskError, Radius
from aiscale.parallel.radius.reference import SimulatedRanks, simulate

__all__ = ["MaskError", "Radius", "SimulatedRanks", "simulate"]
