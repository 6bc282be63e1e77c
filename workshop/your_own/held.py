"""What this process holds: weights, gradients, optimizer states and buffers."""

import gc

import torch


def held_bytes(model):
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    objects = gc.get_objects() + [weight.grad for weight in model.parameters()]
    tensors = [each for each in objects if type(each) in (torch.Tensor, torch.nn.Parameter)]
    storages = [each.untyped_storage() for each in tensors if each.is_floating_point()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())  # each storage once
