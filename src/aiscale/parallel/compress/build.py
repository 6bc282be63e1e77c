"""From the name of a compression method to its compressor."""

from __future__ import annotations

import pkgutil

import torch
from torch import nn

from aiscale.config import Run
from aiscale.distributed import World
from aiscale.parallel.compress.base import Compressor

#: method -> "module:class", imported when it is asked for
METHODS = {
    "none": "aiscale.parallel.compress.base:Compressor",
    "radius": "aiscale.parallel.radius:Radius",
    "top-k": "aiscale.parallel.compress.topk:TopK",
    "random-k": "aiscale.parallel.compress.topk:RandomK",
    "powersgd": "aiscale.parallel.compress.powersgd:PowerSGD",
}


def build_compressor(run: Run, world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> Compressor:
    """The compressor that `run.compression` asks for; raises ConfigError where it does not fit."""
    return pkgutil.resolve_name(METHODS[run.compression.method])(run, world, model, optimizer)
