"""Whether all ranks see the same folder. Each node may have one of that name on its own disk."""

import os
import time
from pathlib import Path

import torch.distributed as dist


def gather(value):
    """Every rank's value, on every rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_shared(path, gather=gather):
    """Stops all ranks unless each sees a file that rank 0 writes beside `path`."""
    mine = f"{path}.{os.urandom(8).hex()}"
    marker = gather(mine)[0]  # rank 0's
    if marker == mine:
        Path(marker).parent.mkdir(parents=True, exist_ok=True)
        Path(marker).touch()
    gather("written")  # no rank looks before
    until = time.monotonic() + 5  # a file system of many nodes may show a new file late
    while not os.path.exists(marker) and time.monotonic() < until:
        time.sleep(0.1)
    seen = gather(os.path.exists(marker))
    if marker == mine:
        os.remove(marker)
    if not all(seen):
        where = os.path.abspath(path)
        raise SystemExit(
            f"rank {seen.index(False)} does not see what rank 0 writes beside {where}: "
            "choose a folder that all nodes share"
        )
