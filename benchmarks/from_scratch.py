"""workshop/from_scratch beside PyTorch on one thread each, and two of its ranks beside one process.

Prints seconds of a step at the full recipe and their ratios, medians of rounds in which all take turns.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

WORKSHOP = Path(__file__).parents[1] / "workshop"
ROUNDS, STEPS = 3, 3


def torch_step_s():
    """Seconds of a training step of the same shape in eager PyTorch, after one to warm up."""
    torch.set_num_threads(1)
    T, width = 256, 384
    block = dict(dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
    words, places, head = nn.Embedding(172, width), nn.Embedding(T, width), nn.Linear(width, 172)
    blocks = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(width, 6, 4 * width, **block), 6, nn.LayerNorm(width), False
    )
    model = nn.ModuleList([words, places, blocks, head])
    adam = torch.optim.Adam(model.parameters(), 3e-4)
    text, mask = torch.randint(172, (16, T + 1)), nn.Transformer.generate_square_subsequent_mask(T)
    for step in range(STEPS + 1):
        if step == 1:
            began = time.perf_counter()
        x = words(text[:, :-1]) + places.weight
        logits = head(blocks(x, mask=mask, is_causal=True))
        nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
        adam.step()
        adam.zero_grad()
    return (time.perf_counter() - began) / STEPS


def step_s(*start):
    """Seconds of a step of `from_scratch.train`, the first one left out."""
    command = [*start, sys.executable, "-m", "from_scratch.train", "--steps", str(STEPS + 1)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, cwd=WORKSHOP, env=environment, capture_output=True, text=True, check=True).stdout
    return median([float(s) for s in re.findall(r"  ([\d.]+) s$", output, re.M)][1:])


if __name__ == "__main__":
    rounds = []
    for _ in range(ROUNDS):
        rounds.append((torch_step_s(), step_s(), step_s("mpiexec", "-n", "2")))
        print("PyTorch {:.2f} s, one process {:.2f} s, two ranks {:.2f} s".format(*rounds[-1]))
    print(f"one process takes {median(one / torch for torch, one, _ in rounds):.2f} times PyTorch's seconds")
    print(f"two ranks are {median(one / two for _, one, two in rounds):.2f} times as fast as one process")
