"""ZeRO-1 for DDP by torch's ZeroRedundancyOptimizer: each parameter's optimizer states live on one rank, its owner.

    aiscale train --recipe laptop --nproc 4 --set parallel.strategy=ddp --set parallel.distributed_optimizer=true

Gradients travel as DDP sends them, whole or compressed, to every rank. The owner of a parameter updates it and
broadcasts it: on top of DDP's bytes come those of the weights (Rajbhandari et al. 2020, stage 1, with the all-reduce
that DDP has instead of a reduce-scatter). Owners are dealt out by torch, the largest parameters first, each to the rank
that has least.

A checkpoint has the form and names of any other's, written by the owners, so a run may go on with other ranks or under
another strategy.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer


def shard(optimizer: Optimizer) -> Optimizer:
    """The same optimizer, not stepped yet, with its states divided over all ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    # Every group carries its own options already; fused is asked for once more, because the optimizer checks it there.
    sharded = ZeroRedundancyOptimizer(optimizer.param_groups, type(optimizer), fused=optimizer.defaults["fused"])
    sharded.state = sharded.optim.state  # of this rank's own parameters
    return sharded


def owner(optimizer: Optimizer, parameter: Tensor) -> int | None:
    """The rank that has the states of `parameter` and updates it; None where every rank has and does."""
    owners = getattr(optimizer, "_param_to_rank", None)  # not by its type: torch warns of itself when that is imported
    return owners[parameter] if owners else None


def state(model: nn.Module, optimizer: Optimizer) -> dict:
    """This rank's part of a sharded optimizer's state, under the names that torch's get_state_dict gives the whole."""
    part = get_optimizer_state_dict(model, optimizer.optim)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group, whole in zip(part["param_groups"], optimizer.param_groups, strict=True):
        group["params"] = [names[parameter] for parameter in whole["params"]]
    return part


def load(model: nn.Module, optimizer: Optimizer, loaded: dict) -> None:
    """Take over what `state` gave and a checkpoint filled."""
    mine = state(model, optimizer)["state"]
    for name, values in mine.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                value.copy_(loaded["state"][name][key])
