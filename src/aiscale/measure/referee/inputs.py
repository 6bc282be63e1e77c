"""Watches losses and generators, and leaves dropout out: its masks cannot be the same on one rank
and on four."""

from __future__ import annotations

import functools
import hashlib
import inspect

import torch
import torch._dynamo
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

from aiscale.measure.referee.modules import tensors_in
from aiscale.measure.referee.recorder import Recorder
from aiscale.measure.referee.trace import bytes_of


def watch_losses(recorder: Recorder) -> None:
    """What a backward pass begins with."""
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors, *args, **kwargs):
        for tensor in tensors_in([tensors]):
            if tensor.numel() == 1:
                if tensor.dtype in (torch.bfloat16, torch.float16):
                    recorder.notes.add("half precision")
                recorder.losses.append(float(tensor.detach()))
                recorder.step["losses"].append(recorder.losses[-1])
        return original(tensors, *args, **kwargs)

    torch.autograd.backward = backward


def watch_tokens(recorder: Recorder) -> None:
    """Over how many targets each `cross_entropy` goes."""
    original = F.cross_entropy
    signature = inspect.signature(original)

    @functools.wraps(original)
    def cross_entropy(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        target = given.arguments["target"]
        is_one_number = given.arguments["reduction"] in ("mean", "sum")
        if is_one_number and not target.is_floating_point() and torch.is_grad_enabled():
            counted = (target != given.arguments["ignore_index"]).sum()
            recorder.step["tokens"].append(int(counted))
        return original(*args, **kwargs)

    F.cross_entropy = cross_entropy


def watch_orders(recorder: Recorder) -> None:
    """Each order that is drawn, of how many: samplers draw that of an epoch."""
    original = torch.randperm

    @functools.wraps(original)
    def randperm(*args, **kwargs):
        drawn = original(*args, **kwargs)
        if drawn.numel() > 1:
            digest = hashlib.sha1(bytes_of(drawn)).hexdigest()[:12]
            recorder.orders.append((drawn.numel(), digest))
        return drawn

    torch.randperm = randperm


def watch_prefetch(recorder: Recorder) -> None:
    """Whether FSDP's units are told what to gather ahead: it changes no number."""
    original = FSDPModule.set_modules_to_forward_prefetch

    @functools.wraps(original)
    def told(unit, modules):
        recorder.notes.add("forward prefetch")
        return original(unit, modules)

    FSDPModule.set_modules_to_forward_prefetch = told


def leave_out_dropout(recorder: Recorder) -> None:
    """In every run, the bare one too. The state of the generator at the first mask of a step is
    kept."""
    original, attention = F.dropout, F.scaled_dot_product_attention

    @functools.wraps(original)
    def dropout(input, p=0.5, training=True, inplace=False):
        if training and p:
            _drawn(recorder)
        return original(input, p, False, inplace)

    @functools.wraps(attention)
    def without_dropout(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **kwargs
    ):
        if dropout_p:
            _drawn(recorder)
        return attention(query, key, value, attn_mask, 0.0, is_causal, **kwargs)

    F.dropout = dropout
    F.scaled_dot_product_attention = without_dropout


def _drawn(recorder: Recorder) -> None:
    recorder.notes.add("dropout")
    state = hashlib.sha1(bytes_of(torch.get_rng_state())).hexdigest()[:12]
    recorder.step["generator"] = recorder.step["generator"] or state
    torch.rand(1)  # the generator goes on, as it would


def leave_out_compiling(recorder: Recorder) -> None:
    """Compiled code would hide its modules."""
    original = torch.compile
    torch._dynamo.config.disable = True

    @functools.wraps(original)
    def compile(model=None, *args, **kwargs):
        if isinstance(model, torch.nn.Module):  # libraries compile functions of theirs
            recorder.notes.add("compiled")
        return original(model, *args, **kwargs)

    torch.compile = compile
