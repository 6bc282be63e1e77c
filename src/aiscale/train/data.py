"""Tokens in a file that may be larger than memory, in one order at every number of ranks.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch

from aiscale.train.presets import shape_of
from aiscale.train.refusal import refuse


class Windows:
    """(sequences, T + 1): tokens cut into sequences, read when they are asked for.

    The last token of each begins the next.
    """

    def __init__(self, tokens: np.memmap, length: int):
        self.tokens = tokens
        self.length = length

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.length

    def __getitem__(self, numbers: torch.Tensor) -> torch.Tensor:
        """numbers (B) -> (B, T + 1)"""
        starts = [number * self.length for number in numbers.tolist()]
        rows = [self.tokens[start : start + self.length + 1] for start in starts]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def read_tokens(path: str | Path) -> tuple[np.memmap, int, str]:
    """(tokens, vocabulary, digest) of a folder of `aiscale data prepare`, or of a file's bytes."""
    path = Path(path)
    if path.is_dir():
        manifest = path / "manifest.json"
        if not manifest.is_file():
            refuse(f"{path} holds no tokens: `aiscale data prepare` makes them")
        about = json.loads(manifest.read_text())
        file = path / "tokens.bin"
        width = 2 if about["vocab_size"] <= 2**16 else 4
        found, stated = file.stat().st_size if file.exists() else 0, width * about["tokens"]
        if found != stated:
            remedy = f"delete {path} and prepare it again"
            refuse(f"{file} has {found:,} bytes, not {stated:,}: {remedy}")
        return np.memmap(file, f"<u{width}", mode="r"), about["vocab_size"], about["sha256"]
    if not path.is_file() or not path.stat().st_size:
        refuse(f"--text {path} is no folder and no file with a text in it")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return np.memmap(path, np.uint8, mode="r"), 256, digest


def read_windows(args) -> tuple[Windows, Windows, str]:
    """(to train on, held out, digest of the text); one line if settings do not fit."""
    tokens, vocabulary, digest = read_tokens(args.text)
    shape = shape_of(args.model)
    if vocabulary > shape.vocabulary:
        sizes = f"{vocabulary:,} different tokens, --model {args.model} {shape.vocabulary:,}"
        refuse(f"--text {args.text} has {sizes}: choose a larger model")
    if args.length > shape.context:
        limit = f"--model {args.model} reads at most {shape.context} tokens"
        refuse(f"--length {args.length} is too long: {limit}")
    end = len(tokens) - round(len(tokens) * args.held_out)
    windows = Windows(tokens[:end], args.length)
    if not len(windows):
        refuse(f"--text {args.text} has no sequence of --length {args.length}: lower it")
    return windows, Windows(tokens[end:], args.length), digest


def batches(windows, first: int, args, rank: int, world_size: int):
    """Each step and this rank's share of its batch. Each epoch has an order of its own."""
    size, drawn = args.batch, None
    times = math.ceil(size / len(windows))
    if times > 1 and rank == 0:
        have = f"--text has {len(windows)} sequences of --length {args.length}"
        print(f"{have}: --batch {size} has each {times} times", file=sys.stderr, flush=True)
    for step in range(first, args.steps):
        epoch, place = divmod(step, times * len(windows) // size)
        if epoch != drawn:
            generator = torch.Generator().manual_seed(epoch)
            orders = [torch.randperm(len(windows), generator=generator) for _ in range(times)]
            order = torch.cat(orders)
            drawn = epoch
        yield step, windows[order[place * size : (place + 1) * size][rank::world_size]]


def share_of(held_out, args, rank, world_size, multiple=1):
    """This rank's part of the first --evaluate-batches: on each rank the same multiple."""
    together = world_size * multiple
    sequences = min(args.batch * args.evaluate_batches, len(held_out)) // together * together
    if not sequences:
        have = f"{len(held_out)} sequences are held out"
        refuse(f"{have}, fewer than {together} for {world_size} shares: raise --held-out")
    return held_out[torch.arange(rank, sequences, world_size)]
