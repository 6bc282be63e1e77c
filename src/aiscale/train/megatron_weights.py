"""The first weights of Megatron-Core's model: the numbers that our model of the same --model has.

Each rank makes its own part only. A number depends on the tensor's name in our model and on its
place in the whole tensor, so that every grid trains the same model, and aiscale.train.ddp, too.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state

from aiscale.train.megatron_names import NAMES, PARTS
from aiscale.train.model import first_weights
from aiscale.train.presets import shape_of


@torch.no_grad()
def draw(model, args):
    """Fills this rank's piece of the model; returns it."""
    shape, numbers = shape_of(args.model), first_weights(args)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    tp = parallel_state.get_tensor_model_parallel_world_size()
    for name, weight in model.named_parameters():
        start, whole = [0] * weight.dim(), list(weight.shape)
        # An expert lies on a rank whole.
        if getattr(weight, "tensor_model_parallel", False) and ".experts." not in name:
            dim = weight.partition_dim
            start[dim], whole[dim] = tp_rank * whole[dim], tp * whole[dim]
        if "linear_qkv" in name:
            draw_heads(weight, block_of(name, model), name, shape, start[0], numbers)
            continue
        part = weight
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            real = min(max(shape.vocabulary - start[0], 0), len(weight))
            weight[real:] = 0.0  # tokens that only pad the vocabulary
            part, whole[0] = weight[:real], shape.vocabulary
        part.copy_(numbers(our_name(name, model, shape), start, part.shape, whole))
    return model


def draw_heads(weight, block, name, shape, first_row, numbers):
    """Megatron-Core keeps a head's query, key and value together, we have three tensors."""
    width, kind = shape.width // shape.heads, name.rsplit(".", 1)[1]
    whole = [shape.width] * weight.dim()
    for head, rows in enumerate(weight.unflatten(0, (-1, 3, width)), first_row // (3 * width)):
        for tensor, part in zip(("query", "key", "value"), rows):
            start = [head * width] + [0] * (weight.dim() - 1)
            part.copy_(numbers(f"blocks.{block}.{tensor}.{kind}", start, part.shape, whole))


def our_name(name, model, shape):
    if shape.tied and name == "output_layer.weight":
        return NAMES["embedding.word_embeddings.weight"]
    if name in NAMES:
        return NAMES[name]
    part, kind = name.split(".", 3)[3].rsplit(".", 1)
    if ".experts." in name:
        return f"blocks.{block_of(name, model)}.experts.{expert_of(part, model)}.{kind}"
    return f"blocks.{block_of(name, model)}.{PARTS[part]}.{kind}"


def block_of(name, model):
    """The number of our block. A layer is named by its place in a stage, but knows the whole."""
    layer = model.decoder.layers[int(name.split(".")[2])]
    return (layer.layer_number - 1) // 2


def expert_of(part, model):
    """The expert's number among those of all ranks, and its matrix: 5.up."""
    _, _, _, number, matrix = part.split(".")
    here = model.config.num_moe_experts // model.config.expert_model_parallel_size
    first = here * parallel_state.get_expert_model_parallel_rank()
    return f"{first + int(number)}.{PARTS[f'mlp.{matrix}']}"
