"""A small language model that reads bytes, and its data. Nothing here knows how many processes there are."""

import pydoc_data.topics
from pathlib import Path

import torch
from torch import nn

TEXT = pydoc_data.topics.__file__  # Python's own help texts, half a megabyte
CONTEXT = 64  # bytes that the model sees at once


def read_windows(path):
    """(sequences, CONTEXT + 1): the bytes of a file, cut into sequences; the last byte of each begins the next."""
    return torch.tensor(list(Path(path).read_bytes())).unfold(0, CONTEXT + 1, CONTEXT)


class LM(nn.Module):
    def __init__(self, width=64, layers=2):
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.register_buffer("places", torch.arange(CONTEXT), persistent=False)  # a constant: no checkpoint needs it
        shape = dict(d_model=width, nhead=4, dim_feedforward=4 * width, dropout=0.0)
        block = dict(shape, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(**block) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, windows):
        """The loss of predicting each byte from those before it."""
        x, y = windows[:, :-1], windows[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=x.device)
        h = self.token(x) + self.place(self.places)
        for block in self.blocks:
            h = block(h, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())
