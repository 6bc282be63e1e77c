"""Continue a text, word by word, with a trained model. Several ranks share the samples.

python -m from_scratch.inference FILE.npz --prompt "the wise dragon" --samples 4
mpiexec -n 2 python -m from_scratch.inference FILE.npz --prompt "the wise dragon" --samples 4
"""

import argparse

import numpy as np

from . import checkpoint, mpi, tensor
from .gpt import GPT
from .tokenizer import Tokenizer, split


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
    parser.add_argument("checkpoint")
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
    for sample in range(ranks.rank, run.samples, ranks.size):  # its number is its seed: any rank draws the same text
        words = generate(model, prompt, run.words, run.temperature, np.random.default_rng(sample))
        texts[sample] = tokenizer.decode(words)
    for rank in ranks.gather(texts) or []:
        texts |= rank
    if ranks.rank == 0:
        for sample in sorted(texts):
            print(texts[sample])


if __name__ == "__main__":
    main()
