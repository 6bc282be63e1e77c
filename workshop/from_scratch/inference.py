"""Continue a text, word by word, with a trained model. Several ranks share the samples.

python -m from_scratch.inference                                      # the small model that comes with the kit
python -m from_scratch.inference FILE.npz --prompt "the wise dragon" --samples 4
mpiexec -n 2 python -m from_scratch.inference FILE.npz --samples 4    # each rank writes two of the texts

The last line has the seconds that all texts took: those of the slowest rank, without start and reading.
"""

import argparse
import time
from pathlib import Path

import numpy as np

from . import checkpoint, mpi, tensor
from .gpt import GPT
from .tokenizer import Tokenizer, split

TRAINED = Path(__file__).with_name("trained.npz")  # of the recipe small; `python -m from_scratch.checkpoint` wrote it


def generate(model, words, n_words, temperature, random):
    """words: a list of numbers. Each new one is drawn from what the model says of the last `block` words."""
    for _ in range(n_words):
        logits = model(tensor.device.to_device(np.array([words[-model.block :]])))
        last = tensor.device.to_host(logits.array)[0, -1].astype(np.float64) / temperature
        chances = np.exp(last - last.max())
        words = [*words, int(random.choice(last.size, p=chances / chances.sum()))]
    return words


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m from_scratch.inference",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", nargs="?", type=Path, default=TRAINED, help="default: %(default)s")
    parser.add_argument("--prompt", help="default: the, or a word that the corpus has")
    parser.add_argument("--words", type=int, default=40)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--device", default="cpu", choices=["cpu", "gpu"])
    run = parser.parse_args(arguments)
    if run.device == "gpu":
        from . import gpu

        tensor.use(gpu)
    ranks = mpi.ranks()
    about, arrays = ranks.broadcast(lambda: checkpoint.read(run.checkpoint))
    tokenizer = Tokenizer(about["words"])
    model = GPT(len(tokenizer.words), **about["shape"])
    checkpoint.restore(arrays, model)
    if run.prompt is None:
        words = ["the"] if "the" in tokenizer.words else [*filter(str.isalpha, tokenizer.words)]
        run.prompt = words[0] if words else tokenizer.words[0]
    if unknown := set(split(run.prompt)) - set(tokenizer.words):
        parser.error(f"the corpus did not have {', '.join(sorted(unknown))}: try {', '.join(tokenizer.words[-5:])}")
    prompt = tokenizer.encode(run.prompt)
    texts = {}
    ranks.barrier()
    began = time.perf_counter()
    for sample in range(ranks.rank, run.samples, ranks.size):  # its number is its seed: any rank draws the same text
        words = generate(model, prompt, run.words, run.temperature, np.random.default_rng(sample))
        texts[sample] = tokenizer.decode(words)
    for rank in ranks.gather(texts) or []:
        texts |= rank
    seconds = time.perf_counter() - began
    if ranks.rank == 0:
        for sample in sorted(texts):
            print(texts[sample])
        what = f"{run.samples} text{'s' * (run.samples > 1)} of {run.words} words"
        by = f"{ranks.size} ranks" if ranks.size > 1 else "one process"
        print(f"{what} by {by} on the {run.device}: {seconds:.2f} s")


if __name__ == "__main__":
    main()
