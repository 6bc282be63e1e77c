"""`aiscale generate RUN`: a trained model continues a text."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", metavar="RUN", help="a run folder, such as runs/laptop")
    add("--prompt", metavar="TEXT", default="The ", help="the text to continue (default: 'The ')")
    add(
        "--tokens",
        type=int,
        metavar="N",
        default=200,
        help="how many tokens to generate (default: 200)",
    )
    add(
        "--temperature",
        type=float,
        metavar="T",
        default=0.8,
        help="0: always the likeliest token (default: 0.8)",
    )
    add(
        "--top-k",
        type=int,
        metavar="K",
        default=0,
        help="draw from the K likeliest tokens; 0: from all (default: 0)",
    )
    add("--seed", type=int, metavar="N", default=0, help="seed of the sampling (default: 0)")


def run(args: argparse.Namespace) -> None:
    import torch

    from aiscale.errors import ConfigError
    from aiscale.train.prepare import Tokenizer, learn
    from aiscale.train.trained import open_folder

    model, stored = open_folder(args.path)
    tokenizer = Tokenizer.from_json(stored) if stored else learn("byte", ())
    text = torch.tensor([tokenizer.encode(args.prompt)])
    for name, value, least in (("prompt", text.numel(), 1), ("tokens", args.tokens, 0)):
        if value < least:
            raise ConfigError(f"--{name} has {value} tokens: it must have at least {least}")
    torch.manual_seed(args.seed)
    how = {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k}
    how = how if args.temperature else {"do_sample": False}
    window, length = model.config.max_seq_len, text.shape[1] + args.tokens
    while text.shape[1] < length:
        # a full window drops its older half
        seen = text if text.shape[1] < window else text[:, -(window // 2) :]
        more = min(length - text.shape[1], window - seen.shape[1])
        new = model.generate(
            seen, attention_mask=torch.ones_like(seen), max_new_tokens=more, pad_token_id=0, **how
        )
        text = torch.cat([text, new[:, seen.shape[1] :]], dim=1)
    print(tokenizer.decode(text[0].tolist()))
