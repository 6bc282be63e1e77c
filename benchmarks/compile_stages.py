"""Compiling a pipeline's stages beside running them, as on Turing's IPUs: appendix A4's numbers.

    python benchmarks/compile_stages.py OUT.json   # some minutes on two cores; needs a C++ compiler

The report's two models, with 12 layers, on 1, 2 and 4 ranks that compile and run their stage at the
same time, each on one core's thread (four ranks share two cores, if there are only two).
`compile_s` is the first sequence of the slowest rank, forward and backward, with empty caches;
`sequence_s` one more, and `plain_s` one without compiling.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.multiprocessing as mp
from common import machine_facts
from torch import nn

LAYERS, HEADS, T, VOCABULARY, TIMES = 12, 12, 128, 67, 12


class Stage(nn.Module):
    def __init__(self, width, rank, ranks):
        super().__init__()
        self.first, self.last = rank == 0, rank == ranks - 1
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(T, width)
        block = nn.TransformerEncoderLayer(
            width, HEADS, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, LAYERS // ranks, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x):  # of the first stage tokens (1, T), else activations (1, T, width)
        x = self.token(x) + self.place.weight if self.first else x
        mask = nn.Transformer.generate_square_subsequent_mask(T)
        x = self.blocks(x, mask, is_causal=True)
        return self.head(x) if self.last else x


def seconds(stage, x, together):
    """Of TIMES passes, forward and backward, each begun by all ranks at once."""
    for _ in range(TIMES):
        together.wait()
        start = time.perf_counter()
        stage(x).sum().backward()
        yield time.perf_counter() - start


def work(rank, ranks, width, together, said):
    torch.set_num_threads(1)
    stage = Stage(width, rank, ranks)
    x = (
        torch.randint(VOCABULARY, (1, T))
        if rank == 0
        else torch.randn(1, T, width, requires_grad=True)
    )
    plain = list(seconds(stage, x, together))
    with TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        first, *later = seconds(torch.compile(stage), x, together)
    said.put((first, statistics.median(later), statistics.median(plain[1:])))


def main(out):
    rows, spawn = [], mp.get_context("spawn")
    for width in (384, 768):
        for ranks in (1, 2, 4):
            said = spawn.SimpleQueue()
            mp.spawn(work, (ranks, width, spawn.Barrier(ranks), said), nprocs=ranks)
            slowest = map(max, zip(*(said.get() for _ in range(ranks)), strict=True))
            row = dict(zip(("compile_s", "sequence_s", "plain_s"), slowest, strict=True))
            rows.append(
                {"width": width, "ranks": ranks}
                | {name: round(value, 5) for name, value in row.items()}
            )
            print(rows[-1], flush=True)
    facts = machine_facts() | {"command": "python benchmarks/compile_stages.py OUT.json"}
    out.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
