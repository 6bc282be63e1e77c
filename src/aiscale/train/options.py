"""The options of all trainers, without torch: a check before a job starts can read them."""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics

TEXT = pydoc_data.topics.__file__  # Python's own help texts, half a megabyte


def options(description: str | None = None) -> argparse.ArgumentParser:
    """A parser with what every trainer has; a trainer adds its own."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_and_data(parser.add_argument_group("model and data"))
    add_optimizer(parser.add_argument_group("optimizer"))
    add_computing(parser.add_argument_group("computing"))
    add_run(parser.add_argument_group("the run"))
    return parser


def add_model_and_data(group) -> None:
    add = group.add_argument
    add("--model", default="tiny", help="a name in presets.toml, or a folder of transformers")
    add("--text", default=TEXT, help="a file to learn from, or a folder of aiscale data prepare")
    add("--held-out", type=float, default=0.0, metavar="SHARE", help="of the text, at its end")
    add("--length", type=int, default=64, help="tokens of a sequence")
    add("--steps", type=int, default=20)
    add("--batch", type=int, default=16, help="sequences in one step, over all ranks")
    add("--micro-batch", type=int, default=2, help="sequences that a rank computes at once")
    add("--seed", type=int, default=0, help="of the first weights")


def add_optimizer(group) -> None:
    add = group.add_argument
    add("--optimizer", choices=("adamw", "lamb"), default="adamw")
    add("--lr", type=float, default=3e-3)
    add("--min-lr", type=float, help="where a cosine ends; without it the rate is constant")
    add("--warm-up", type=int, default=0, metavar="STEPS", help="in which the rate grows to --lr")
    add("--decay-steps", type=int, metavar="STEPS", help="when the cosine ends (default: --steps)")
    add("--weight-decay", type=float, default=0.01, help="of matrices; biases and norms have none")
    add("--beta2", type=float, default=0.999)
    add("--clip", type=float, default=1.0, metavar="NORM", help="the largest norm of a gradient")


def add_computing(group) -> None:
    add = group.add_argument
    add("--bf16", action="store_true", help="compute in bf16, keep weights in fp32")
    add("--fp64", action="store_true", help="to compare strategies to the last digit")
    add("--recompute", action="store_true", help="blocks again in the backward pass: less memory")
    add("--compile", action="store_true", help="each block by torch.compile")
    add("--peak-tflops", type=float, metavar="N", help="of a device; the record then has MFU")


def add_run(group) -> None:
    add = group.add_argument
    add("--save", default="run", metavar="FOLDER", help="record and checkpoints; it goes on there")
    add("--save-every", type=int, default=10, metavar="STEPS")
    add("--save-minutes", type=float, default=math.inf, metavar="MINUTES", help="and so often")
    add("--evaluate-every", type=int, default=0, metavar="STEPS", help="0: never")
    add("--evaluate-batches", type=int, default=1, metavar="N", help="of the text held out")
    add("--patience", type=float, default=1200, metavar="SECONDS", help="for a rank that is late")
