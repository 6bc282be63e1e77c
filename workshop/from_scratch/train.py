"""Train, in any of the four stages.

python -m from_scratch.train                                            # 0: one process
mpiexec -n 2 python -m from_scratch.train                               # 1: two, each half of every batch
python -m from_scratch.train --device gpu                               # 2: a GPU
mpiexec -n 2 python -m from_scratch.train --device gpu                  # 3: both
mpiexec -n 2 python -m from_scratch.train --device gpu --sums nccl      # 3, gradients from GPU to GPU (untried)
NUMBA_ENABLE_CUDASIM=1 python -m from_scratch.train tiny --device gpu   # a GPU that numba simulates: tiny only

They print the same losses. A run goes on from its checkpoint, if --checkpoint names one that is there.
OMP_NUM_THREADS=1 in front of mpiexec gives each rank one core: else each one's products take all cores.
"""

import argparse
import time
from pathlib import Path

from . import checkpoint, mpi, tensor
from .adam import Adam
from .corpus import corpus
from .dataloader import DataLoader
from .gpt import GPT
from .tokenizer import Tokenizer, split

RECIPES = {
    "full": {"block": 256, "layers": 6, "heads": 6, "width": 384, "batch": 16, "lr": 3e-4, "epochs": 50},
    "small": {"block": 64, "layers": 2, "heads": 4, "width": 96, "batch": 16, "lr": 1e-3, "epochs": 40},
    "tiny": {"block": 4, "layers": 1, "heads": 2, "width": 8, "batch": 2, "lr": 3e-3, "steps": 4},
}


def options(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m from_scratch.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", default="full", choices=RECIPES)
    parser.add_argument("--device", default="cpu", choices=["cpu", "gpu"])
    parser.add_argument("--overlap", action="store_true", help="sum gradients among ranks while others are computed")
    parser.add_argument("--sums", default="mpi", choices=["mpi", "nccl"], help="nccl: from GPU to GPU (untried)")
    parser.add_argument("--corpus", type=Path, help="a text file, in place of the corpus that comes with it")
    parser.add_argument("--checkpoint", type=Path, help="FILE.npz, written after each epoch and at the end")
    for name in ("block", "layers", "heads", "width", "batch", "epochs", "steps"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--lr", type=float)
    run = parser.parse_args(arguments)
    for name, value in RECIPES[run.recipe].items():
        if getattr(run, name) is None:
            setattr(run, name, value)
    if run.sums == "nccl" and (run.device != "gpu" or run.overlap):
        parser.error("--sums nccl adds up on GPUs, all at the end: it needs --device gpu, without --overlap")
    return run


def main(arguments=None):
    run = options(arguments)
    if run.device == "gpu":
        from . import gpu

        tensor.use(gpu)
    ranks = mpi.ranks(run.sums)

    tokenizer, numbers = ranks.broadcast(lambda: read_corpus(run))
    loader = DataLoader(numbers, run.block, run.batch, ranks.rank, ranks.size)
    shape = {"block": run.block, "layers": run.layers, "heads": run.heads, "width": run.width}
    model = GPT(len(tokenizer.words), **shape)
    adam = Adam(model.parameters(), run.lr)
    kept = ranks.broadcast(lambda: run.checkpoint and run.checkpoint.exists() and checkpoint.read(run.checkpoint))
    if kept:
        about, arrays = kept
        if (about["shape"], about["words"]) != (shape, tokenizer.words):
            held = f"{about['shape']} and {len(about['words'])} words"
            raise SystemExit(f"{run.checkpoint} holds {held}, not {shape} and these words: name another file")
        checkpoint.restore(arrays, model, adam)
        adam.steps = about["steps"]
    ranks.broadcast_parameters(model.parameters())

    steps = run.steps or loader.steps(run.epochs)
    per_epoch = max(1, loader.steps(1))  # a batch may be larger than a short text
    say = print if ranks.rank == 0 else lambda *_, **__: None
    n_parameters = sum(w.array.size for w in model.parameters().values())
    say(f"{n_parameters:,} parameters; {len(numbers):,} tokens, {len(tokenizer.words)} different; to step {steps}")
    for step in range(adam.steps, steps):
        began = time.perf_counter()
        loss = model.loss(*loader(step))
        ranks.backward(loss, model.parameters(), run.overlap)
        adam.step()
        mean = ranks.mean(float(tensor.device.to_host(loss.array)[0]))
        say(f"step {step + 1:4}  loss {mean:.6f}  {time.perf_counter() - began:.2f} s", flush=True)
        if run.checkpoint and ranks.rank == 0 and ((step + 1) % per_epoch == 0 or step + 1 == steps):
            checkpoint.save(run.checkpoint, model, adam, tokenizer.words, shape)
    if run.device == "gpu":
        say("moved: " + ", ".join(f"{n:,} bytes {where}" for where, n in tensor.device.moved_bytes.items()))


def read_corpus(run):
    text = run.corpus.read_text() if run.corpus else corpus()
    if run.recipe == "tiny":
        text = " ".join(split(text)[:40])  # 40 words have few different ones: a simulated GPU counts in seconds
    tokenizer = Tokenizer(split(text))
    return tokenizer, tokenizer.encode(text)


if __name__ == "__main__":
    main()
