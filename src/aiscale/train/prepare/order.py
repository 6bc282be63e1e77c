"""The order of training windows: it depends only on the seed and the step number.

    batches = Batches(corpus.train, seq_len=128, global_batch=16, seed=1337)
    x, y = batches.batch(step)                   # the global batch, (B,T) each; y: x shifted by one
    batches.share(step, rank, world, n_micro)    # a rank's micro-batches: B/world sequences

The tokens are cut into windows of T, which every epoch visits in a new order. The global batch is
the same at every world size, because it is drawn first and then divided among the ranks. An epoch's
permutation is computed, not stored: a Feistel network (Luby and Rackoff 1988) permutes the numbers
below 4^k; a result beyond the number of windows goes in again until it is below. No new version of
a random generator changes the order of a run.

B sequences in the global batch, T tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from aiscale.errors import ConfigError

ROUNDS = 6  #: of the Feistel network; four suffice if the round function is pseudo-random


class Batches:
    """Global batches of windows of `tokens`, any 1-D sequence whose slices are numpy arrays.
    Without a seed they are in order, for evaluation: batch 0 is always the first B windows."""

    def __init__(self, tokens, *, seq_len: int, global_batch: int, seed: int | None) -> None:
        self.tokens, self.seq_len = tokens, seq_len
        self.global_batch, self.seed = global_batch, seed
        #: the last target of a window is the next window's first token
        self.windows = (len(tokens) - 1) // seq_len
        if self.windows < 1:
            raise ConfigError(
                f"this part of the corpus has {len(tokens)} tokens, fewer than one block of "
                f"loop.seq_len {seq_len} and its last target, {seq_len + 1}: "
                "lengthen the text or shorten loop.seq_len"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass over the windows.

        Each epoch leaves out the remainder, different windows each time; with fewer windows than a
        global batch, an epoch is one batch that repeats some.
        """
        return max(1, self.windows // self.global_batch)

    def window_ids(self, step: int) -> np.ndarray:
        """The windows of the global batch of `step`, (B,)."""
        epoch, place = divmod(step, self.steps_per_epoch)
        places = (place * self.global_batch + np.arange(self.global_batch)) % self.windows
        return places if self.seed is None else permute(places, self.windows, self.seed, epoch)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The whole global batch of a step: x and y, (B,T) int64 each."""
        return self._read(self.window_ids(step))

    def share(
        self, step: int, rank: int, world: int, n_micro: int = 1
    ) -> list[tuple[Tensor, Tensor]]:
        """The micro-batches of data-parallel rank `rank` of `world`: its slice in n_micro parts."""
        if self.global_batch % (world * n_micro):
            fitting = -(-self.global_batch // (world * n_micro)) * world * n_micro
            raise ConfigError(
                f"loop.global_batch {self.global_batch} is not divisible by {world} data-parallel "
                f"ranks x {n_micro} micro-batches: set loop.global_batch={fitting}"
            )
        ours = np.split(self.window_ids(step), world)[rank]
        return [self._read(ids) for ids in np.split(ours, n_micro)]

    def _read(self, window_ids: np.ndarray) -> tuple[Tensor, Tensor]:
        T = self.seq_len
        rows = torch.empty((len(window_ids), T + 1), dtype=torch.int64)
        target = rows.numpy()
        for row, window in enumerate(window_ids.tolist()):
            target[row] = self.tokens[window * T : window * T + T + 1]
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def permute(places: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of (seed, epoch) at `places`, numbers below n."""
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))  # bits in each half of the network
    mask = np.uint64((1 << int(half)) - 1)
    with np.errstate(over="ignore"):  # the arithmetic is modulo 2^64
        key = mix(mix(np.array([seed % 2**64], np.uint64)) + np.uint64(epoch))
        keys = [mix(key + np.uint64(i)) for i in range(ROUNDS)]
        out = np.asarray(places).astype(np.uint64)
        inside = np.zeros(len(out), dtype=bool)
        while not inside.all():
            left, right = out[~inside] >> half, out[~inside] & mask
            for round_key in keys:
                left, right = right, left ^ (mix(right + round_key) & mask)
            out[~inside] = (left << half) | right
            inside = out < n
    return out.astype(np.int64)


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer (Steele et al. 2014): each input bit flips half of the output bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
