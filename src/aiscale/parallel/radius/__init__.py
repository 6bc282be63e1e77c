"""Radius: sparse steps send the same few entries of each gradient; a dense step now and then chooses new ones.

mask.py        which entries: scores, the k largest, their neighbours; packed into a message, the others kept
compressor.py  `Radius`, a DDP communication hook made of both
reference.py   one process that simulates n ranks with the same code
"""

from aiscale.parallel.radius.compressor import MaskError, Radius
from aiscale.parallel.radius.reference import SimulatedRanks
