"""The trainers: the lessons' scripts, grown by a page. `python -m aiscale.train.fsdp --help`."""

import os
import signal
import sys

# So many collectives torch keeps in mind, for watch.py; torch reads it when it is imported.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")

if sys.argv[0] == "-m":
    # `python -m aiscale.train.ddp` is starting. A scheduler's signal may come before torch is
    # imported: it waits until ranks.py has a handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
