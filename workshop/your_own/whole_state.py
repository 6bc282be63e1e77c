"""All that replicas share, in few tensors: the sums of a step, and what a newcomer lacks."""

import hashlib

import torch


def one_buffer(model):
    """A buffer of all gradients, which are views of it, and two places more: one message sends it."""
    sizes = [weight.numel() for weight in model.parameters()]
    *places, rest = (buffer := torch.zeros(sum(sizes) + 2)).split([*sizes, 2])
    for weight, place in zip(model.parameters(), places, strict=True):
        weight.grad = place.view_as(weight)
    return buffer, *rest


def state_of(model, optimizer):
    """Weights and Adam's states. Adam makes these in its first step; a newcomer receives them before."""
    for weight in model.parameters():
        moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[weight] = {"step": torch.zeros(()), **moments}
    states = [tensor for each in optimizer.state.values() for tensor in each.values()]
    return [*(weight.detach() for weight in model.parameters()), *states]


def digest(state):
    """A hash of all bits: equal states have equal ones."""
    return hashlib.sha256(torch.cat([tensor.flatten() for tensor in state]).numpy()).hexdigest()
