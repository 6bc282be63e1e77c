"""What a library prints on standard output as ranks meet goes aside: that is for the command's results, as --json.

    with greetings_aside():
        dist.init_process_group("gloo")       # up to torch 2.12, gloo greets on every rank

They go to standard error. Printed by C++, they pass by sys.stdout, so the file descriptor itself is turned round.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def greetings_aside() -> Iterator[None]:
    """Whatever this process writes to standard output inside goes to standard error."""
    sys.stdout.flush()
    try:
        out = os.dup(1)
    except OSError:  # it has been closed
        yield
        return
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(out, 1)
        os.close(out)
