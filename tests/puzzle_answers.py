"""Wrong answers to the puzzles, as changes of the solutions, and what a participant is told."""

#: (what is wrong, text of the solution, its replacement, what the participant reads)
WRONG = {
    "broadcast": [
        (
            "one rank too few",
            "while reached < n:",
            "while 2 * reached < n:",
            "rank 4 returns [None]",
        ),
        (
            "a chain for one chunk",
            "if n_chunks > 1:",
            "if n_chunks > 0:",
            "the result is right, but time 7 s instead of 3 s. Rank 0",
        ),
        ("another order", "return chunks\n", "return chunks[::-1]\n", "chunks in another order"),
        (
            "a hole",
            "chunks.append(",
            "chunks.append(None) or chunks.append(",
            "rank 0 at 0 s: send to rank 1 got None",
        ),
    ],
    "ring": [
        (
            "adds too often",
            "if step < n - 1:",
            "if step < n:",
            "chunk 0 on rank 0 holds rank 0 more than once",
        ),
        ("adds too seldom", "if step < n - 1:", "if step < n - 2:", "lacks rank"),
        ("another chunk", "c = (me - 1 - step) % n", "c = (me - step) % n", "made of other chunks"),
        (
            "a fixed number",
            "me, n = rank.index, rank.world_size",
            "me, n = rank.index, 4",
            "(with 3 ranks)",
        ),
    ],
    "ddp": [
        ("no micro-batches", " * rank.n_micro)", ")", "2 times the mean: what is it divided by?"),
        ("sum for mean", "1 / (rank.world_size * rank.n_micro)", "1", "8 times the mean"),
        (
            "own data",
            "rank.all_reduce(rank.gradients[layer])",
            "pass",
            "updated with 0.25 times the mean gradient of this rank's own data",
        ),
        (
            "one rank only",
            "rank.all_reduce(",
            "rank.index and rank.all_reduce(",
            "deadlock: nobody can go on",
        ),
    ],
    "zero": [
        ("sum for mean", "1 / rank.world_size", "1", "4 times the mean"),
        (
            "all of it",
            "rank.update(rank.part(w), mine[layer])",
            "rank.update(w, mine[layer])",
            "one is a part, the other is not",
        ),
        (
            "stale parts",
            "rank.all_gather(rank.part(w), into=w)",
            "pass",
            "the right gradient in one part only",
        ),
        (
            "gathers too early",
            "        rank.update(rank.part(w), mine[layer])\n"
            "        rank.all_gather(rank.part(w), into=w)",
            "        rank.all_gather(rank.part(w), into=w)\n"
            "        rank.update(rank.part(w), mine[layer])",
            "the right gradient in one part only",
        ),
    ],
    "fsdp": [
        (
            "no prefetch",
            "gather(layer + 1)",
            "layer and gather(layer)",
            "time 17 s instead of 14 s. Ranks wait for a gather",
        ),
        (
            "keeps all",
            "        rank.free(rank.parameters[layer])\n        rank.free(",
            "        rank.free(",
            "memory 16 GB instead of 10 GB. A layer's",
        ),
        (
            "never frees, never gathers again",
            "        gather(layer - 1)\n",
            "",
            "which this rank freed at",
        ),
        (
            "own gradient",
            "rank.reduce_scatter(rank.gradients[layer])",
            "rank.part(rank.gradients[layer])",
            "0.25 times the mean gradient of this rank's own data",
        ),
    ],
    "checkpoint": [
        (
            "keeps all",
            "twice, inputs = 3, {}",
            "twice, inputs = 0, {}",
            "memory 34 GB instead of 25 GB. Everything",
        ),
        (
            "one too few",
            "twice, inputs = 3, {}",
            "twice, inputs = 2, {}",
            "memory 28 GB instead of 25 GB. Memory is fullest",
        ),
        (
            "one too many",
            "twice, inputs = 3, {}",
            "twice, inputs = 4, {}",
            "time 28 s instead of 27 s. More layers",
        ),
        (
            "the late layers",
            "layer >= twice",
            "layer < 5",
            "this rank keeps nothing of its forward pass",
        ),
    ],
    "tp": [
        (
            "no first sum",
            "rank.all_reduce(y)",
            "pass",
            "the gradient of layer 1 on rank 0 is wrong: the loss must see",
        ),
        (
            "no second sum",
            "rank.all_reduce(dx)",
            "pass",
            "this rank's part of the hidden numbers only",
        ),
        (
            "a sum too many",
            "rank.all_reduce(dx)",
            "rank.all_reduce(dx); rank.all_reduce(dx)",
            "4 times the right one",
        ),
        (
            "forgets a layer",
            "rank.backward_weights(0, dh)",
            "pass",
            "rank 0 has no gradient of layer 0",
        ),
    ],
    "1f1b": [
        (
            "GPipe",
            "rank.world_size - 1 - rank.index",
            "rank.n_micro",
            "memory 8 GB instead of 4 GB. All forward",
        ),
        (
            "one too far",
            "rank.world_size - 1 - rank.index",
            "rank.world_size - rank.index",
            "memory 5 GB instead of 4 GB. Rank 0 runs too far",
        ),
        (
            "not far enough",
            "rank.world_size - 1 - rank.index",
            "max(0, rank.world_size - 2 - rank.index)",
            "time 54 s instead of 33 s. Ranks wait",
        ),
        ("a fixed number", "rank.world_size - 1", "3", "(with 3 ranks, 5 micro-batches"),
    ],
    "zero-bubble": [
        (
            "the last ones forgotten",
            "rank.n_micro + rank.index",
            "rank.n_micro",
            "on rank 1 is wrong: it lacks micro-batch 7",
        ),
        (
            "not put off",
            "        if i >= rank.index:\n            backward_weights(rank, i - rank.index)",
            "            backward_weights(rank, i)",
            "time 30 s instead of 27 s. In the picture",
        ),
        (
            "all at the end",
            "        if i >= rank.index:\n            backward_weights(rank, i - rank.index)",
            "    for i in range(rank.n_micro):\n        backward_weights(rank, i)",
            "memory 8 GB instead of 4 GB. In the picture",
        ),
        (
            "both halves twice",
            "backward_weights(rank, i - rank.index)",
            "backward_weights(rank, i - rank.index); backward_weights(rank, i - rank.index)",
            "which this rank freed",
        ),
    ],
    "interleaved": [
        (
            "GPipe",
            "ahead = 2 * (n - 1 - me) + n",
            "ahead = 2 * m",
            "memory 8 GB instead of 5.5 GB. All forward",
        ),
        ("1F1B's start", "ahead = 2 * (n - 1 - me) + n", "ahead = n - 1 - me", "loss got None"),
        (
            "too far ahead",
            "2 * (n - 1 - me) + n",
            "2 * (n - me) + n",
            "memory 6.5 GB instead of 5.5 GB. Ranks run too far",
        ),
        (
            "only one direction",
            "        if k >= ahead:",
            "        if k >= ahead and k < 2 * m:",
            "sent rank 0 2 messages that it never received",
        ),
    ],
    "broadcast-again": [
        (
            "the chain",
            "me, n = rank.index",
            "return broadcast(rank, n_chunks)\n    me, n = rank.index",
            "time 14 s instead of 10 s. That is the chain",
        ),
        (
            "never the last chunk",
            "mine >= 0",
            "0 <= mine < n_chunks - 1",
            "deadlock: nobody can go on",
        ),
        (
            "a fixed number",
            "n.bit_length() - 1",
            "3",
            "rank 0 at 0 s: sends to rank 4, but ranks are 0 to 3 (with 4 ranks, 5 chunks)",
        ),
        (
            "the last one first",
            "return [have[c]",
            "return [have[n_chunks - 1 - c]",
            "in another order, or one twice",
        ),
    ],
}
