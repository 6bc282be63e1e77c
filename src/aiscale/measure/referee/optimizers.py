"""Watches optimizers: the gradients, learning rates and states with which a step begins, and the
weights after it."""

from __future__ import annotations

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from aiscale.measure.referee import trace
from aiscale.measure.referee.recorder import Recorder

#: States that have a value for each weight: Adam's first moment, SGD's momentum.
_STATES = ("exp_avg", "momentum_buffer")


def watch_optimizers(recorder: Recorder) -> None:
    def before(optimizer, *_):
        if recorder.seen_enough():
            recorder.finish("steps", 0)
        if not recorder.bare:
            _keep(recorder, optimizer)

    def after(optimizer, *_):
        recorder.optimizer_stepped(optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _keep(recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
    step = recorder.step
    for group in optimizer.param_groups:
        step["lr"].append(float(group["lr"]))
        for parameter in group["params"]:
            name = recorder.names.get(id(parameter))
            if name is None:
                recorder.unseen.add(type(optimizer).__name__)
                continue
            if parameter.grad is None:
                continue
            step["grad"][name] = trace.piece(parameter.grad, parameter)
            for key in _STATES:
                state = optimizer.state.get(parameter, {}).get(key)
                if isinstance(state, torch.Tensor):
                    step["states"][name] = trace.piece(state, parameter)
