"""The model: embeddings, blocks, a head that gives each word of the vocabulary a score."""

import numpy as np

from . import tensor
from .layers import Block, Embedding, Layer, LayerNorm, Linear, cross_entropy, drawing


class GPT(Layer):
    """GPT-2's architecture, its head not tied to the embedding. dtype: fp64 where gradients are checked."""

    def __init__(self, vocabulary, block=256, layers=6, heads=6, width=384, seed=0, dtype=np.float32):
        draw = drawing(seed, dtype)
        std = 0.02 / np.sqrt(2 * layers)  # 2 additions to x in each block: this keeps their sum's size
        self.block = block
        self.words, self.positions = Embedding(draw, vocabulary, width), Embedding(draw, block, width)
        self.blocks = [Block(draw, width, heads, std) for _ in range(layers)]
        self.norm, self.head = LayerNorm(draw, width), Linear(draw, width, vocabulary)

    def __call__(self, words):
        """[B, T] words -> [B, T, V] logits of the word that follows each of them"""
        positions = tensor.device.to_device(np.arange(words.shape[1]))
        x = self.words(words) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, words, targets):
        """Mean cross-entropy in nats, [1]. words and targets: [B, T] on the host."""
        return cross_entropy(self(tensor.device.to_device(words)), tensor.device.to_device(targets))
