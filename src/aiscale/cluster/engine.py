"""What runs inside an engine on behalf of the notebook: joining, leaving, and forgetting."""

from __future__ import annotations

import gc
import os
import platform
import sys

_store = None  #: at which the ranks of this process group have met, on rank 0 of a job
_started_here = 0  #: ranks on this node, used or not


def join(
    rendezvous: dict[str, str],
    size: int,
    device: str,
    timeout_s: float,
    path: list[str],
    fresh: bool,
    link_mbit_s: float = 0,
) -> dict:
    """Join a new process group of `size` ranks at `rendezvous`, and set the names that `%%px` cells rely on.

    What the notebook can import from `path`, its sys.path, ranks can import as well. link_mbit_s: the rate to which
    the links between ranks are slowed.

    Returns what `Ranks` shows: rank, pid, host, device, backend, threads. With `fresh`, variables are forgotten first.
    """
    import torch
    import torch.distributed as dist

    import aiscale.distributed

    shell = _shell()
    if fresh:
        shell.reset(new_session=False)
        gc.collect()
        torch.set_default_dtype(torch.float32)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    sys.path += [folder for folder in path if folder not in sys.path]
    os.environ.update(rendezvous, WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(_ranks_here(size)))
    world = aiscale.distributed.connect(device=device, timeout_s=timeout_s)
    world.link.rate_mbit_s = link_mbit_s
    names = {"rank": world.rank, "world_size": world.size, "world": world, "torch": torch, "dist": dist}
    shell.push(names, interactive=False)
    return {
        "rank": world.rank,
        "pid": os.getpid(),
        "host": platform.node(),
        "device": str(world.device),
        "backend": world.backend,
        "threads": torch.get_num_threads(),
    }


def _ranks_here(size: int) -> int:
    """How many of the first `size` ranks are on this node. There are more in a job that was submitted by hand for more;
    ranks fill one node after the other."""
    global _started_here
    _started_here = _started_here or int(os.environ["LOCAL_WORLD_SIZE"])  # before connect() writes it anew
    return min(_started_here, size - int(os.environ["RANK"]) + int(os.environ["LOCAL_RANK"]))


def offer_store(timeout_s: float) -> dict[str, str]:
    """On rank 0 of a job: a new store at which its ranks meet; the variables by which they find it."""
    from aiscale.cluster.step import ADDRESS
    from aiscale.distributed import host_store

    global _store
    _store, found = host_store(timeout_s, os.environ[ADDRESS])
    return found


def leave() -> None:
    """Close this rank's connections, so that ranks which wait for it fail now rather than at their time-out."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _shell():
    from IPython.core.interactiveshell import InteractiveShell

    return InteractiveShell.instance()
