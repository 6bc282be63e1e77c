"""Windows of the corpus that do not overlap, in an order that depends on the seed alone."""

import numpy as np


class DataLoader:
    """An endless run of batches. Each rank takes its share of every batch, so that all together see what one would."""

    def __init__(self, numbers, block, batch, rank=0, ranks=1, seed=0):
        if batch % ranks:
            raise SystemExit(f"batch={batch} windows cannot be shared by {ranks} ranks: take a multiple of {ranks}")
        self.numbers, self.block, self.batch, self.seed = np.asarray(numbers), block, batch, seed
        self.share = slice(rank * batch // ranks, (rank + 1) * batch // ranks)
        self.n_windows = (len(numbers) - 1) // block  # a window has a word more: the last one's target

    def steps(self, epochs):
        return epochs * self.n_windows // self.batch

    def windows(self, step):
        """Which windows all ranks read in this step: epoch by epoch, each shuffled anew."""
        places = np.arange(step * self.batch, (step + 1) * self.batch)
        epochs = {epoch: self.order(epoch) for epoch in set(places // self.n_windows)}
        return np.array([epochs[place // self.n_windows][place % self.n_windows] for place in places])

    def order(self, epoch):
        return np.random.default_rng([self.seed, epoch]).permutation(self.n_windows)

    def __call__(self, step):
        """(words, targets) of this rank in this step: [share, block] each; a target is the word that follows."""
        begins = self.windows(step)[self.share, None] * self.block
        places = begins + np.arange(self.block)
        return self.numbers[places], self.numbers[places + 1]
