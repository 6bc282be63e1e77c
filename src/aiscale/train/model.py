"""A GPT of any size, or one of transformers' models. It does not know how many processes there are.

`build` makes it without memory, a strategy cuts it up, and `draw` gives each rank its own part.

Shapes: B sequences, T tokens, D width, H heads, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from aiscale.train.normal import normal, slices
from aiscale.train.presets import entries_of, is_ours, shape_of

#: The last matrix of each branch, by its name in our model and in transformers' ones.
OUTPUTS = ("out", "down", "c_proj", "out_proj", "fc_out", "o_proj", "down_proj", "dense_4h_to_h")


def loss_of(logits, targets):
    """Nats for each token, from (B, T, V) and (B, T), in fp32 at least."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return cross_entropy(logits.flatten(0, 1).to(wide), targets.flatten())


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):  # (B, T, D)
        h = self.norm1(x)
        q, k, v = (  # (B, H, T, D / H)
            part(h).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Embedding(nn.Module):
    def __init__(self, width, vocabulary, context):
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(context, width)

    def forward(self, text):  # (B, T) -> (B, T, D)
        return self.token(text) + self.place.weight[: text.shape[1]]


class GPT(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.tied = shape.tied
        self.embed = Embedding(shape.width, shape.vocabulary, shape.context)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        logits = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head = nn.Sequential(nn.LayerNorm(shape.width), logits)
        self.tie_weights()

    def tie_weights(self):
        """Without memory a model has no ties: they are made again when it gets its memory."""
        if self.tied:
            self.head[1].weight = self.embed.token.weight

    def forward(self, x):  # (B, T) -> (B, T, V)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def transformers_model(name):
    from aiscale.train.hugging_face import Transformer

    return Transformer(name)


def build(args):
    """The model of --model, without memory: `draw` gives it that."""
    ours = is_ours(args.model)
    with torch.device("meta" if ours else "cpu"):
        model = GPT(shape_of(args.model)) if ours else transformers_model(args.model)
    for block in model.blocks:
        if args.recompute:
            checkpoint(block)  # computed again in the backward pass: keeps its input only
        if args.compile:
            block.compile()
    return model


@torch.no_grad()
def draw(model, args, device):
    """Gives a model its memory and its first weights; returns it."""

    def with_memory(tensor):
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    model._apply(with_memory)
    model.tie_weights()
    numbers = first_weights(args)
    for name, weight in model.named_parameters():
        part, start = _part_of(weight)
        part.copy_(numbers(name, start, part.shape, weight.shape))
    return model


def first_weights(args):
    """A function that gives a part of a tensor, of shape `size` from `start` on, its first weights.

    Each number depends on --seed, the tensor's name and the number's place in the whole tensor.
    So a rank makes its own part only, and all ways to cut the model up make the same one. The
    lessons' model gets the numbers that it has in the lessons, a folder of transformers its own.
    """
    known = _known_weights(args)
    depth = shape_of(args.model).layers

    def numbers(name, start, size, whole):
        if known and known(name) is not None:
            return known(name)[slices(start, size)]
        if len(whole) == 1:
            return torch.full(size, 1.0 if name.endswith("weight") else 0.0)  # a norm; a bias
        is_output = name.removesuffix(".weight").endswith(OUTPUTS)
        std = 0.02 / (2 * depth) ** 0.5 if is_output else 0.02  # GPT-2's
        return normal(f"{args.seed} {name}", std, start, size, whole)

    return numbers


def _part_of(weight):
    """(this rank's part, where it begins in the whole tensor)"""
    if not isinstance(weight, DTensor):
        return weight, (0,) * weight.dim()
    placed = weight.shape, weight.device_mesh, weight.placements
    _, start = compute_local_shape_and_global_offset(*placed)
    return weight.to_local(), start


def _known_weights(args):
    """A function that gives a whole tensor by name, or None if weights are to be drawn."""
    if args.model == "tiny":
        torch.manual_seed(args.seed)
        return GPT(shape_of("tiny")).state_dict().get  # None for a mixture's experts
    if entries_of(args.model):
        return None
    from aiscale.train.hugging_face import stored_weights

    return stored_weights(args.model)
