"""`aiscale generate RUN`: a trained model continues a text."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", metavar="RUN", help="a run folder, such as runs/laptop")
    add("--prompt", metavar="TEXT", default="The ", help="the text to continue (default: 'The ')")
    add("--tokens", type=int, metavar="N", default=200, help="how many tokens to generate (default: 200)")
    add("--temperature", type=float, metavar="T", default=0.8, help="0: always the likeliest token (default: 0.8)")
    add("--top-k", type=int, metavar="K", default=0, help="draw from the K likeliest tokens; 0: from all (default: 0)")
    add("--seed", type=int, metavar="N", default=0, help="seed of the sampling (default: 0)")


def run(args: argparse.Namespace) -> None:
    import torch

    from aiscale.train import open_trained

    model, tokenizer = open_trained(args.path)
    prompt = torch.tensor([tokenizer.encode(args.prompt)])
    generator = torch.Generator().manual_seed(args.seed)
    text = model.generate(prompt, args.tokens, temperature=args.temperature, top_k=args.top_k, generator=generator)
    print(tokenizer.decode(text[0].tolist()))
