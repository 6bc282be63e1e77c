"""The trainers, `python -m aiscale.train.fsdp --help`, and `fit(run)`, which they replace."""

import os
import signal
import sys

# So many collectives torch keeps in mind, for watch.py; torch reads it when it is imported.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")

if sys.argv[0] == "-m":
    # `python -m aiscale.train.ddp` is starting. A scheduler's signal may come before torch is
    # imported: it waits until job.py has a handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

_OF_FIT = {
    "AlreadyTrained": "loop",
    "Result": "loop",
    "TrainingError": "loop",
    "fit": "loop",
    "RunFolderError": "records",
    "load_run": "records",
    "open_trained": "records",
    "read_metrics": "records",
}


def __getattr__(name: str):
    """`fit` and its like are imported when they are first used: the trainers need none of them."""
    if name not in _OF_FIT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_OF_FIT[name]}"), name)
