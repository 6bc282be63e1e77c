"""How a trainer says no: one line, from one rank."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

BAD_SETTINGS = 2  #: exit status


def refuse(reason: str) -> NoReturn:
    """Ends this rank. All ranks find the same fault in settings; rank 0 says it."""
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
    if next((int(os.environ[name]) for name in names if name in os.environ), 0) == 0:
        print(f"aiscale: {reason}", file=sys.stderr, flush=True)
    else:
        time.sleep(1)  # a launcher stops the others as soon as one has ended
    sys.exit(BAD_SETTINGS)
