"""Runs a function of a benchmark on new ranks and returns its result.

    result = on_ranks(2, "aiscale.bench.radius.steps:measure", quick)    # rank 0's, of measure(world, quick)
    turns(world, {"step": step, "all-reduce": reduce}, rounds)      # in such a function: all ranks take the same turns

Arguments and result travel as JSON.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it loads torch: seconds, which a command that refuses or has nothing to do need not take
    from aiscale.bench.timing import Paired

Report = Callable[[str], object]  #: called with a line on what is being measured


class BenchError(RuntimeError):
    """A benchmark that failed; the message is one line."""


def silent(message: str) -> None:
    """The Report that prints nothing."""


def on_ranks(
    n: int, function: str, *arguments: object, start: Callable[[int, Sequence[str]], int] | None = None
) -> Any:
    """What `module:function` returns on rank 0, called as (world, *arguments) on `n` new ranks on the CPU.

    `start` runs `python ARGV` as n connected ranks and returns the exit status; the default is `distributed.launch`,
    which forks ranks where that is safe. Raises BenchError if a rank fails.
    """
    from aiscale.distributed import launch
    from aiscale.parallel import preload

    start = start or functools.partial(launch, warm_up=functools.partial(preload, "ddp"))
    # Not a TemporaryDirectory: a rank forked from this process would remove it on exit.
    file, out = tempfile.mkstemp(prefix="aiscale-bench-", suffix=".json")
    os.close(file)
    try:
        status = start(n, ["-m", "aiscale.bench", function, out, json.dumps(arguments)])
        if status:
            name = function.partition(":")[0].rpartition(".")[2]
            raise BenchError(f"the ranks of bench {name} ended with status {status}; the reason is printed above")
        return json.loads(Path(out).read_text())
    finally:
        os.unlink(out)


def turns(world, actions: dict[str, Callable[[], object]], rounds: int, *, warmup: int = 1) -> Paired:
    """`paired` on all ranks of `world`: a turn lasts until the slowest rank has finished."""
    from aiscale.bench.timing import paired

    def together(action: Callable[[], object]) -> Callable[[], None]:
        return lambda: (action(), world.barrier())

    return paired({name: together(action) for name, action in actions.items()}, rounds, warmup=warmup)


def random_batch(run, data_world: int) -> list:
    """One step's micro-batches of random tokens, for one of `data_world` data-parallel ranks."""
    import torch

    n_micro, size = run.loop.micro_batches(data_world)
    tokens = torch.randint(0, run.model.vocab_size, (n_micro, size, run.loop.seq_len + 1))
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]


def without_sending(engine, batch: list) -> None:
    """A DDP step that computes on all ranks and sends nothing."""
    with engine.module.no_sync():
        engine.step(batch, 1e-4)
