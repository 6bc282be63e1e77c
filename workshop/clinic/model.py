"""A small language model that reads bytes, and its data. Nothing here knows how many ranks there are.

Shapes: B sequences, T bytes to predict (a window has T + 1), D width.
"""

import pydoc_data.topics
import re
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

TEXT = Path(pydoc_data.topics.__file__)  # Python's own help texts
CONTEXT = 32  # bytes that the model predicts at once
PAD = 0  # fills short documents up; occurs in no text


def read_windows(n):
    """(n, CONTEXT + 1): pieces of a text, mixed; the first n of always the same order."""
    text = torch.tensor(list(TEXT.read_bytes()[1000:20000]))
    return shuffled(text.unfold(0, CONTEXT + 1, CONTEXT))[:n]


def read_documents(n):
    """Documents, mixed, each a tensor of 5 to CONTEXT + 1 bytes; the first n of always the same order."""
    phrases = [phrase.strip()[: CONTEXT + 1] for phrase in re.split(rb"[.,;:()\n]", TEXT.read_bytes())]
    phrases = [phrase for phrase in phrases if len(phrase) >= 5]
    return [torch.tensor(list(phrases[i])) for i in shuffled(torch.arange(len(phrases)))[:n]]


def shuffled(rows):
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def padded(documents):
    """(B, T + 1): documents of unequal length in one tensor, the shorter ones filled up with PAD."""
    return pad_sequence(documents, batch_first=True, padding_value=PAD)


class LM(nn.Module):
    def __init__(self, width=32, layers=2, tied=False):
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        shape = dict(d_model=width, nhead=2, dim_feedforward=4 * width, dropout=0.0)
        block = dict(shape, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(**block) for _ in range(layers))
        self.head = nn.Linear(width, 256, bias=False)
        if tied:
            nn.init.normal_(self.token.weight, std=0.2)
            self.head.weight = self.token.weight

    def embed(self, windows):
        """(B, T + 1) -> (B, T, D)"""
        return self.token(windows[:, :-1]) + self.place.weight[: windows.shape[1] - 1]

    def through(self, blocks, h):
        """(B, T, D) -> (B, T, D)"""
        mask = nn.Transformer.generate_square_subsequent_mask(h.shape[1])
        for block in blocks:
            h = block(h, src_mask=mask, is_causal=True)
        return h

    def losses(self, h, windows):
        """(B, T): the loss of predicting each byte from those before it; 0 where there is none."""
        logits, targets = self.head(h).flatten(0, 1), windows[:, 1:]
        kept = nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=PAD, reduction="none")
        return kept.view(targets.shape)

    def forward(self, windows):
        return self.losses(self.through(self.blocks, self.embed(windows)), windows)
