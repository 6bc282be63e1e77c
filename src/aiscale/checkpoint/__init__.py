"""Checkpoints: a training state on disk that is either complete or absent, and is checked when it is read."""

from aiscale.checkpoint.store import (
    NOTE,
    CheckpointError,
    check_shared,
    flush,
    latest,
    load,
    load_weights,
    read_note,
    save,
)
