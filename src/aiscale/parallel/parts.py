"""The parts into which `pipeline` cuts a GPT.

Shapes: B sequences of one micro-batch, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from aiscale.model import GPT, cross_entropy, place


class Part(nn.Module):
    """Some blocks of a GPT, under GPT's own names. With tied embeddings the last part also holds the token embedding,
    as its head."""

    def __init__(self, whole: GPT, layers: Iterable[int], autocast_dtype: torch.dtype | None) -> None:
        super().__init__()
        self.config, layers = whole.config, list(layers)
        self.is_first, self.is_last = 0 in layers, whole.config.n_layer - 1 in layers
        self.autocast_dtype = autocast_dtype
        if self.is_first or (self.is_last and self.config.tied):
            self.token_embedding = whole.token_embedding
        if self.is_first and self.config.position == "learned":
            self.position_embedding = whole.position_embedding
        self.blocks = nn.ModuleDict({str(layer): whole.blocks[layer] for layer in layers})
        if self.is_last:
            self.norm = whole.norm
            if not self.config.tied:
                self.head = whole.head

    def forward(self, x: Tensor) -> Tensor:
        """First part: tokens (B,T) -> activations (B,T,D). Others: activations (B,T,D) -> activations (B,T,D)."""
        with self._autocast(x.device):
            positions = torch.arange(x.shape[1], device=x.device)
            if self.is_first:
                x, where = GPT.embed(self, x, positions)
            else:
                where = place(positions, self.config, x.dtype)
            for block in self.blocks.values():
                if self.config.activation_checkpointing and torch.is_grad_enabled():
                    x = checkpoint(block, x, where, use_reentrant=False, preserve_rng_state=False)
                else:
                    x = block(x, where)
            return self.norm(x) if self.is_last else x

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy from the output (B,T,D) of the last part."""
        with self._autocast(hidden.device):
            head = self.token_embedding if self.config.tied else self.head
            return cross_entropy(hidden, head.weight, targets)

    def _autocast(self, device: torch.device) -> AbstractContextManager:
        return torch.autocast(device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None)
