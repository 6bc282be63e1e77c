"""Watches gradients: as they come out of a backward pass, before they are clipped, and what
optimizers are given."""

from __future__ import annotations

import functools

import torch
from torch.distributed.tensor import DTensor

from aiscale.measure.referee import trace
from aiscale.measure.referee.recorder import Recorder


def watch_parameter(recorder: Recorder, parameter: torch.Tensor | None, name: str) -> None:
    """Sees each gradient of a parameter before anybody adds, averages or clips it."""
    if parameter is None or id(parameter) in recorder.names or not parameter.is_floating_point():
        return
    recorder.names[id(parameter)] = name
    recorder.alive.append(parameter)
    if parameter.requires_grad and parameter.is_leaf:
        parameter.register_hook(functools.partial(_came_out, recorder, name, parameter))


def _came_out(recorder: Recorder, name: str, parameter: torch.Tensor, gradient: torch.Tensor):
    noisy = None
    if recorder.noise and not isinstance(gradient, DTensor):
        noisy = gradient = recorder.with_rounding(gradient)
    new = trace.piece(gradient, parameter)
    if new["partial"]:
        return noisy
    before = recorder.step["local"].get(name)
    if before is not None:
        new["values"] += before["values"]
    recorder.step["local"][name] = new
    return noisy


def watch_clipping(recorder: Recorder) -> None:
    """What a gradient is before torch's functions clip it."""
    utils = torch.nn.utils
    utils.clip_grads_with_norm_ = _clipping(recorder, utils.clip_grads_with_norm_)
    utils.clip_grad_norm_ = _clipping(recorder, utils.clip_grad_norm_)
    utils.clip_grad.clip_grad_norm_ = utils.clip_grad_norm_  # imported by this name, too


def _clipping(recorder: Recorder, original):
    @functools.wraps(original)
    def watched(parameters, *args, **kwargs):
        if not isinstance(parameters, torch.Tensor):
            parameters = list(parameters)  # a generator can be read once, and the original needs it
        for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
            name = recorder.names.get(id(parameter))
            if name and parameter.grad is not None:
                kept = trace.piece(parameter.grad, parameter)
                recorder.step["before_clip"].setdefault(name, kept)
        return original(parameters, *args, **kwargs)

    return watched
