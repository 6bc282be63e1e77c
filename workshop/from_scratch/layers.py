"""The parts of a GPT. Each is a few operations on tensors, so none of them needs a backward pass of its own."""

import math

import numpy as np

from . import tensor
from .tensor import Tensor, gather, reshape, transpose


def gelu(x):
    return Tensor(tensor.device.gelu(x.array), (x,), lambda grad: (tensor.device.gelu_backward(grad, x.array),))


def causal_softmax(scores, scale):
    """Attention weights of [.., T, T] scores: a word sees itself and those before it."""
    y = tensor.device.causal_softmax(scores.array, scale)
    return Tensor(y, (scores,), lambda grad: (tensor.device.causal_softmax_backward(grad, y, scale),))


def layer_norm(x, gain, bias):
    y, normed, rstd = tensor.device.layer_norm(x.array, gain.array, bias.array)
    return Tensor(y, (x, gain, bias), lambda grad: tensor.device.layer_norm_backward(grad, gain.array, normed, rstd))


def cross_entropy(logits, targets):
    """The loss: [.., V] logits against an array of words, mean. The tape begins here, so there is no gradient above."""
    loss, probabilities = tensor.device.cross_entropy(logits.array, targets)
    return Tensor(loss, (logits,), lambda _: (tensor.device.cross_entropy_backward(probabilities, targets),))


class Layer:
    def parameters(self, prefix=""):
        """name -> tensor, of this layer and of those in it, in the order in which they were made"""
        named = {}
        for name, part in vars(self).items():
            if isinstance(part, Tensor):
                named[prefix + name] = part
            for i, layer in enumerate(part if isinstance(part, list) else [part]):
                if isinstance(layer, Layer):
                    named |= layer.parameters(f"{prefix}{name}.{i}." if isinstance(part, list) else f"{prefix}{name}.")
        return named


class Embedding(Layer):
    """A row for each word, or for each position."""

    def __init__(self, draw, n_rows, width):
        self.table = draw(n_rows, width)

    def __call__(self, indices):
        return gather(self.table, indices)


class Linear(Layer):
    def __init__(self, draw, n_in, n_out, std=0.02):
        self.weight, self.bias = draw(n_in, n_out, std=std), draw(n_out, std=0)

    def __call__(self, x):
        return x @ self.weight + self.bias


class LayerNorm(Layer):
    def __init__(self, draw, width):
        self.gain, self.bias = draw(width, mean=1, std=0), draw(width, std=0)

    def __call__(self, x):
        return layer_norm(x, self.gain, self.bias)


class MultiHeadAttention(Layer):
    def __init__(self, draw, width, heads, std):
        self.heads = heads
        self.query, self.key, self.value = (Linear(draw, width, width) for _ in range(3))
        self.out = Linear(draw, width, width, std)

    def __call__(self, x):
        batch, words, width = x.shape
        per_head = width // self.heads

        def split(y):
            """[B, T, C] -> [B, heads, T, C / heads]"""
            return transpose(reshape(y, batch, words, self.heads, per_head), 0, 2, 1, 3)

        query, key, value = split(self.query(x)), split(self.key(x)), split(self.value(x))
        weights = causal_softmax(query @ transpose(key, 0, 1, 3, 2), scale=1 / math.sqrt(per_head))
        return self.out(reshape(transpose(weights @ value, 0, 2, 1, 3), batch, words, width))


class MLP(Layer):
    def __init__(self, draw, width, std):
        self.up, self.down = Linear(draw, width, 4 * width), Linear(draw, 4 * width, width, std)

    def __call__(self, x):
        return self.down(gelu(self.up(x)))


class Block(Layer):
    def __init__(self, draw, width, heads, std):
        self.norm1, self.attention = LayerNorm(draw, width), MultiHeadAttention(draw, width, heads, std)
        self.norm2, self.mlp = LayerNorm(draw, width), MLP(draw, width, std)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def drawing(seed, dtype):
    """Draws parameters, one after the other, from a normal distribution."""
    random = np.random.default_rng(seed)

    def draw(*shape, mean=0.0, std=0.02):
        return Tensor(tensor.device.to_device((mean + std * random.standard_normal(shape)).astype(dtype)))

    return draw
