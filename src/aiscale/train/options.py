"""The options of all trainers, without torch: a check before a job starts can read them."""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
from pathlib import Path

TEXT = pydoc_data.topics.__file__  # Python's own help texts, half a megabyte
#: The usual weights of losses that even out experts' load: of DeepSeek-V3 (arXiv:2412.19437,
#: section 4.2), which has a bias beside it, and of Switch Transformer (arXiv:2101.03961).
AUX_LOSS = {"seq_aux_loss": 1e-4, "aux_loss": 0.01}
DEEPSPEED = str(Path(__file__).with_name("ds_config.json"))


def options(trainer: str = "serial", description: str | None = None) -> argparse.ArgumentParser:
    """A parser with what every trainer has, and with what is this trainer's own."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if trainer in OWN:
        OWN[trainer](parser.add_argument_group(f"of {trainer}"))
    add_model_and_data(parser.add_argument_group("model and data"))
    add_optimizer(parser.add_argument_group("optimizer"))
    add_computing(parser.add_argument_group("computing"))
    add_run(parser.add_argument_group("the run"))
    return parser


def add_model_and_data(group) -> None:
    add = group.add_argument
    models = "a name in presets.toml, layers x width (4x128), or a folder of transformers"
    add("--model", default="tiny", help=models)
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
    add("--save-every", type=int, default=10, metavar="STEPS", help="0: only if it is stopped")
    add("--save-minutes", type=float, default=math.inf, metavar="MINUTES", help="and so often")
    add("--evaluate-every", type=int, default=0, metavar="STEPS", help="0: never")
    add("--evaluate-batches", type=int, default=1, metavar="N", help="of the text held out")
    add("--patience", type=float, default=1200, metavar="SECONDS", help="for a rank that is late")


# What only one trainer has -----------------------------------------------------------------------


def add_buckets(group) -> None:
    help = "MiB of gradients sent at once; larger than the model: all after the backward pass"
    group.add_argument("--bucket-mb", type=float, metavar="MIB", help=help)


def add_zero(group) -> None:
    add = group.add_argument
    add("--config", type=open, default=DEEPSPEED, help="of DeepSpeed")
    add("--stage", type=int, choices=(0, 1, 2, 3), default=2, help="of ZeRO")


def add_grid(group) -> None:
    add = group.add_argument
    add("--tp", type=int, default=2, help="ranks that share each matrix")
    add("--pp", type=int, default=2, help="stages of the pipeline")


def add_megatron(group) -> None:
    add = group.add_argument
    add_grid(group)
    add("--virtual-stages", type=int, default=1, help="pieces of the model a rank")
    add("--sequence-parallel", action="store_true", help="tp cuts norms, too")
    add("--no-zero1", action="store_true", help="each copy has all Adam states")
    add("--fp16", action="store_true", help="compute in fp16, scale the loss")
    add("--experts", type=int, default=0, help="in place of each MLP; 0: no mixture")
    add("--top-k", type=int, default=2, metavar="K", help="experts that compute a token")
    add("--ep", type=int, default=1, help="ranks that share the experts, of those of tp x dp")
    counted = "where the loss that evens out the experts' load counts it: in a sequence, as on any "
    counted += "grid, or (aux_loss) in a micro-batch"
    add("--balance", choices=tuple(AUX_LOSS), default="seq_aux_loss", help=counted)
    weight = "of that loss; default: {seq_aux_loss}, with aux_loss {aux_loss}".format(**AUX_LOSS)
    add("--aux-loss", type=float, metavar="WEIGHT", help=weight)


def add_radius(group) -> None:
    add = group.add_argument
    add("--density", type=float, default=0.4, help="share that a sparse step sends")
    add("--interval", type=int, default=5, help="steps from one dense step to the next")
    add("--dense-until", type=int, default=0, metavar="STEP", help="before it all are dense")
    add_buckets(group)


OWN = {
    "ddp": add_buckets,
    "zero": add_zero,
    "tp_pp": add_grid,
    "megatron": add_megatron,
    "radius": add_radius,
}
TRAINERS = ("serial", "ddp", "fsdp", "zero", "tp_pp", "megatron", "radius")
