"""Runs a script on ranks whose network cards are slowed: what a slower machine makes of it.

    torchrun --nproc-per-node=4 -m aiscale.measure.slowed 100 train_radius.py --steps 20
    torchrun --nproc-per-node=4 -m aiscale.measure.slowed 100 -m aiscale.train.radius --steps 20

The first word is the rate of each rank's card in Mbit/s. `distributed/link.py` says what such a
card does, and what it does not.
"""

from __future__ import annotations

import math
import os
import runpy
import sys
from typing import NoReturn

import torch
import torch.distributed as dist

from aiscale.measure.distributed import wire
from aiscale.measure.distributed.counter import Traffic
from aiscale.measure.distributed.link import Link

USAGE = "python -m aiscale.measure.slowed MBIT_PER_S SCRIPT.py|-m MODULE [OPTIONS]"


def slow_down(rate_mbit_s: float) -> Link:
    """From here on, all that this rank sends passes a card of this rate."""
    link = Link()
    link.rate_mbit_s = rate_mbit_s
    backend = wire.backend_for(Traffic(), link)
    init = dist.init_process_group

    def slowed(*_, **options):
        # The script's own choice of a backend, its first argument, has no say here.
        options.pop("backend", None)
        return init(backend, **options)

    dist.init_process_group = slowed
    return link


def refuse(reason: str) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":
        print(f"aiscale: {reason}", file=sys.stderr, flush=True)
    sys.exit(2)


def main(words: list[str]) -> None:
    if len(words) < 2 or (words[1] == "-m" and len(words) < 3):
        refuse(f"usage: {USAGE}")
    try:
        rate_mbit_s = float(words[0])
    except ValueError:
        rate_mbit_s = math.nan
    if not (math.isfinite(rate_mbit_s) and rate_mbit_s > 0):
        refuse(f"the rate is {words[0]}: give a positive number of Mbit/s")
    if torch.cuda.is_available():
        refuse("this machine has GPUs, whose links are real: set CUDA_VISIBLE_DEVICES to nothing")
    slow_down(rate_mbit_s)
    if words[1] == "-m":
        # A trainer asks how it was started: see aiscale/train/__init__.py.
        sys.argv = ["-m", *words[3:]]
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        return
    sys.argv = words[1:]
    # Where Python looks first for a script's imports.
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[1])))
    runpy.run_path(words[1], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
