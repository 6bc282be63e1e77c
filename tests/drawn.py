"""`python -m drawn [SETTINGS, WORLD_SIZE, RANK]`: {category: bytes} that this rank holds, and its
`peak` while it is built. The other ranks do not exist.

One rank a process: after Megatron-Core's engine the profiler loses allocations of the next one.
"""

from __future__ import annotations

import json
import sys

from aiscale.config import Run
from aiscale.distributed.fake import fake_world
from aiscale.meter import allocated_bytes, held_bytes
from aiscale.parallel.build import build, preload


def built(settings: list[str], size: int, rank: int) -> dict[str, int]:
    run = Run().override("loop.device=cpu", *settings)
    preload(run.parallel.strategy)
    engines = []
    with fake_world(size, rank, memory=True) as world:
        _, running = allocated_bytes(lambda: engines.append(build(run, world)))
        held = held_bytes(engines[0].tensors())
        engines[0].close()
    return held | {"peak": max(running)}


if __name__ == "__main__":
    print(json.dumps(built(*json.loads(sys.argv[1]))))
