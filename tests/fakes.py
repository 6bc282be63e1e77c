"""`python -m fakes JOBS`: what ranks of a world that does not exist send and hold, as JSON.

A job is [settings, micro-batches, world size, ranks, whether tensors have memory, steps]; it is answered by the rows of
each of the ranks.
"""

from __future__ import annotations

import json
import sys

from aiscale.distributed.fake import fake_world
from aiscale.verify.bytes import ByteCase, predicted_and_counted


def rows(settings: list[str], micro_batches: int, size: int, ranks: list[int], memory: bool, steps: int) -> list:
    run, found = ByteCase("fake", tuple(settings), (size,), micro_batches).run(size), []
    for rank in ranks:
        with fake_world(size, rank, memory=memory) as world:
            found.append(predicted_and_counted(run, world, steps))
    return found


if __name__ == "__main__":
    print(json.dumps([rows(*job) for job in json.loads(sys.argv[1])]))
