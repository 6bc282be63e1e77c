"""Checkpoints: a training state on disk that is either complete or absent, and is checked when it is read.

store.py      save, find and load: torch's distributed checkpoint and a note, aiscale.json
integrity.py  checksums of all files
"""

from aiscale.checkpoint.store import NOTE, CheckpointError, flush, latest, load, load_weights, read_note, save
