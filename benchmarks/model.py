"""A step of the trainers' GPT beside other people's and beside the floor, taking turns in one run.

    python benchmarks/model.py [--quick] [--json]
    NANOGPT=~/nanoGPT python benchmarks/model.py      # a folder with nanoGPT's model.py, not here

Each step is a forward and a backward pass, clipping and AdamW, on the same batch, of models with
equally many parameters:
    ours            the trainers' model, loss and optimizer
    transformers    its GPT-2, with its scaled-dot-product attention, the tanh GELU in one operation
    nanoGPT         its model.py and its own optimizer
    floor           the matrix products alone, into memory that is there: no framework can be faster
                    without faster products. Attention's count half: a token sees earlier ones only.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import transformers
from common import Paired, arguments, check, finish, machine_facts, paired, table
from torch import Tensor, nn

from aiscale.measure.meter import allocated_bytes
from aiscale.train.model import build, draw, loss_of
from aiscale.train.optimizer import make_optimizer
from aiscale.train.options import options
from aiscale.train.presets import shape_of

transformers.utils.logging.disable_progress_bar()


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A model (as --model names it), and what a step trains on."""

    model: str
    batch: int
    length: int
    rounds: int


CELLS = [
    Cell(model="gpt2", batch=4, length=128, rounds=8),
    Cell(model="gpt2", batch=16, length=128, rounds=4),
]
QUICK_CELLS = [Cell(model="2x64", batch=2, length=64, rounds=3)]


def measure(quick: bool = False) -> dict:
    """Everything; quick uses a tiny model and checks nothing."""
    rows = [training(cell) for cell in (QUICK_CELLS if quick else CELLS)]
    result = {"machine": machine_facts(), "training": rows}
    return {**result, "checks": [] if quick else checks(result)}


def checks(result: dict) -> list[dict]:
    """The targets of this benchmark: as fast as others' models."""
    targets = {"transformers": 1.0, "nanoGPT": 1.0}
    rows = []
    for row in result["training"]:
        for other in targets.keys() & row["speedup"].keys():
            name = f"{row['model']}, batch {row['batch']}: speed over {other}"
            rows.append(check(name, row["speedup"][other], targets[other], at_most=False))
    return rows


def training(cell: Cell) -> dict:
    torch.manual_seed(0)
    shape = shape_of(cell.model)
    tokens = torch.randint(0, shape.vocabulary, (cell.batch, cell.length + 1))
    steps = {name: make(cell, tokens) for name, make in contenders().items()}
    sizes = {name: parameters for name, (_, parameters) in steps.items()}
    if len(set(sizes.values())) > 1:
        raise RuntimeError(f"these models are not the same: {sizes}")
    acts = {name: step for name, (step, _) in steps.items()}
    acts["floor"] = products_step(cell)
    timing = paired(acts, cell.rounds)
    return {
        "model": cell.model,
        "parameters": sizes["ours"],
        "batch": cell.batch,
        "length": cell.length,
        "rounds": cell.rounds,
        **summary(timing, cell.batch * cell.length),
        "peak_memory_bytes": {name: peak_bytes(make, cell) for name, make in contenders().items()},
    }


def contenders() -> dict[str, Callable]:
    """What makes a model and its step, by name."""
    there = {"ours": our_step, "transformers": step_of_transformers}
    if "NANOGPT" in os.environ:
        there["nanoGPT"] = step_of_nanogpt
    return there


def our_step(cell: Cell, tokens: Tensor) -> tuple[Callable[[], None], int]:
    args = options("serial").parse_args([f"--model={cell.model}"])
    model = draw(build(args), args, torch.device("cpu"))

    def loss() -> Tensor:
        return loss_of(model(tokens[:, :-1]), tokens[:, 1:])

    return a_step(model, make_optimizer(model, args), loss)


def step_of_transformers(cell: Cell, tokens: Tensor) -> tuple[Callable[[], None], int]:
    shape = shape_of(cell.model)
    config = transformers.GPT2Config(
        n_layer=shape.layers,
        n_head=shape.heads,
        n_embd=shape.width,
        vocab_size=shape.vocabulary,
        n_positions=shape.context,
        activation_function="gelu_pytorch_tanh",
        tie_word_embeddings=shape.tied,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters())

    def loss() -> Tensor:
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        return loss_of(logits, tokens[:, 1:])

    return a_step(model, optimizer, loss)


def step_of_nanogpt(cell: Cell, tokens: Tensor) -> tuple[Callable[[], None], int]:
    theirs = nanogpt()
    shape = shape_of(cell.model)
    config = theirs.GPTConfig(
        n_layer=shape.layers,
        n_head=shape.heads,
        n_embd=shape.width,
        vocab_size=shape.vocabulary,
        block_size=shape.context,
        dropout=0.0,
    )
    model = theirs.GPT(config)
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cpu")
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss() -> Tensor:
        return model(inputs, targets)[1]

    return a_step(model, optimizer, loss)


def nanogpt() -> ModuleType:
    """Its model.py, under another name: this file has that one."""
    file = Path(os.environ["NANOGPT"]).expanduser() / "model.py"
    spec = importlib.util.spec_from_file_location("nanogpt", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt"] = module
    spec.loader.exec_module(module)
    return module


def a_step(model: nn.Module, optimizer, loss: Callable) -> tuple[Callable[[], None], int]:
    def step() -> None:
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, sum(weight.numel() for weight in model.parameters())


def products_step(cell: Cell) -> Callable[[], None]:
    """Only the matrix products of one training step.

    For each weight these are one forward and two backward (input and weight gradient), for
    attention two forward and four backward, at half size.
    """
    shape, rows = shape_of(cell.model), cell.batch * cell.length
    width = shape.width
    block = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    sizes = block * shape.layers + [(shape.vocabulary, width)]
    weights = [torch.randn(size) for size in sizes]
    widths = {number for size in sizes for number in size}
    x = {number: torch.randn(rows, number) for number in widths}
    y = {number: torch.randn(rows, number) for number in widths}
    d_weight = {size: torch.empty(size) for size in sizes}
    heads = max(1, cell.batch * shape.heads // 2)
    q, gathered = (torch.randn(heads, cell.length, width // shape.heads) for _ in range(2))
    p, scores = (torch.randn(heads, cell.length, cell.length) for _ in range(2))

    @torch.no_grad()
    def step() -> None:
        for weight in weights:
            n_out, n_in = weight.shape
            torch.mm(x[n_in], weight.t(), out=y[n_out])
            torch.mm(x[n_out], weight, out=y[n_in])
            torch.mm(x[n_out].t(), x[n_in], out=d_weight[n_out, n_in])
        for _ in range(3 * shape.layers):
            torch.bmm(q, q.transpose(1, 2), out=scores)
            torch.bmm(p, q, out=gathered)

    return step


def peak_bytes(make: Callable, cell: Cell) -> int:
    """The most memory that a contender has at a time: weights, and what three steps allocate."""
    tokens = torch.zeros(cell.batch, cell.length + 1, dtype=torch.int64)
    step, parameters = make(cell, tokens)
    return 4 * parameters + max(allocated_bytes(lambda: [step() for _ in range(3)])[1])


def summary(timing: Paired, tokens: int) -> dict:
    """Seconds and tokens/s of each contender, and its slowdown against ours."""
    others = [name for name in timing.seconds if name != "ours"]
    return {
        "seconds": {name: timing.median_s(name) for name in timing.seconds},
        "tokens_per_s": {name: tokens / timing.median_s(name) for name in timing.seconds},
        "speedup": {name: timing.ratio(name, "ours") for name in others},
        "speedup_of_each_round": {name: timing.ratios(name, "ours") for name in others},
    }


def show(result: dict) -> None:
    for row in result["training"]:
        title = (
            f"{row['model']}, {row['parameters'] / 1e6:.1f} M parameters, "
            f"{row['batch']} x {row['length']} tokens a step, median of {row['rounds']} rounds"
        )
        heads = ("", "tokens/s", "ms", "time / ours", "range over rounds", "peak MiB")
        table(title, heads, _rows(row))


def _rows(row: dict) -> list[tuple[str, ...]]:
    rows = []
    for name, seconds in row["seconds"].items():
        ratio, span = "1", ""
        if name != "ours":
            each = row["speedup_of_each_round"][name]
            ratio, span = f"{row['speedup'][name]:.3f}", f"{min(each):.2f} to {max(each):.2f}"
        memory = row["peak_memory_bytes"].get(name)
        peak = f"{memory / 2**20:,.0f}" if memory else ""
        rate = f"{row['tokens_per_s'][name]:,.0f}"
        rows.append((name, rate, f"{1e3 * seconds:,.1f}", ratio, span, peak))
    return rows


if __name__ == "__main__":
    args = arguments(__doc__).parse_args()
    raise SystemExit(finish(measure(args.quick), show, args.json))
