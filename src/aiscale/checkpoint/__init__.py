"""Checkpoints: a training state on disk that is either whole or not there, checked when it is opened.

store.py      saving, finding and loading: torch's distributed checkpoint and its note
staging.py    a copy of the state in host memory, from which a thread writes while training goes on
integrity.py  fingerprints: is each file still what was written?
"""

from aiscale.checkpoint.store import (
    NOTE,
    READERS,
    CheckpointError,
    Saveable,
    best,
    flush,
    latest,
    load,
    load_weights,
    of_another_run,
    prepare,
    quiet,
    read_note,
    save,
    whole,
)

__all__ = [
    "NOTE",
    "READERS",
    "CheckpointError",
    "Saveable",
    "best",
    "flush",
    "latest",
    "load",
    "load_weights",
    "of_another_run",
    "prepare",
    "quiet",
    "read_note",
    "save",
    "whole",
]
