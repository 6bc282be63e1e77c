"""Our GPT against transformers' GPT-2 and against the floor, taking turns in one run.

    python benchmarks/model.py [--quick] [--json]

Both models have the same weights (ours are saved as a Hugging Face folder that transformers reads;
the losses must agree before anything is timed), the same batches and the same fused AdamW.
transformers runs without dropout and key/value cache, with its scaled-dot-product attention, in two
settings:
    fair      the tanh GELU in one fused operation, as ours
    default   GPT-2's own activation, gelu_new: the same function, spelled out in seven operations
The floor is the time of a step's matrix products alone, written to memory allocated beforehand: no
framework can be faster without faster products. Attention's products count half, because a token
attends only to earlier ones.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
import transformers
from common import HAS_BF16, Paired, arguments, check, finish, machine_facts, paired, table
from torch import Tensor
from transformers.activations import ACT2FN

from aiscale.lesson.model import GPT, kernels
from aiscale.lesson.optim import build_optimizer
from aiscale.measure.meter import allocated_bytes
from aiscale.plan.config import ModelConfig, OptimizerConfig

transformers.utils.logging.disable_progress_bar()


@dataclass(frozen=True, kw_only=True)
class Size:
    n_layer: int
    d_model: int
    vocab_size: int
    batch: int = 8
    seq_len: int = 256
    rounds: int = 10

    def config(self) -> ModelConfig:
        return ModelConfig(
            n_layer=self.n_layer,
            n_head=max(1, self.d_model // 64),
            d_model=self.d_model,
            vocab_size=self.vocab_size,
            max_seq_len=self.seq_len,
        )

    def facts(self) -> dict:
        return {"size": f"{self.n_layer}x{self.d_model}", "vocab_size": self.vocab_size}


SIZES = [
    # the GPT-in-C project's model, half its batch
    Size(n_layer=6, d_model=384, vocab_size=172, rounds=12),
    Size(n_layer=12, d_model=768, vocab_size=50257, batch=4, rounds=6),  # GPT-2's smallest
]
QUICK_SIZES = [Size(n_layer=2, d_model=64, vocab_size=172, batch=2, seq_len=64, rounds=3)]


def measure(quick: bool = False) -> dict:
    """Everything; quick uses a tiny model and checks nothing."""
    sizes = QUICK_SIZES if quick else SIZES
    result = {
        "machine": machine_facts(),
        "training": [_training(size) for size in sizes],
        "kernels": [row for size in sizes for row in _kernels(size)],
    }
    return {**result, "checks": [] if quick else checks(result)}


def checks(result: dict) -> list[dict]:
    """The targets of this benchmark."""
    rows = []
    for row in result["training"]:
        size, speed, memory = row["size"], row["speedup"], row["peak_memory_bytes"]
        over = memory["ours"] / memory["transformers fair"]
        rows += [
            check(
                f"{size}: speed over transformers, fair",
                speed["transformers fair"],
                1.0,
                at_most=False,
            ),
            check(
                f"{size}: speed over transformers, default",
                speed["transformers default"],
                1.1,
                at_most=False,
            ),
            check(f"{size}: peak memory over transformers", over, 1.0),
        ]
        if HAS_BF16:
            rows.append(
                check(
                    f"{size}: bf16 autocast over our fp32",
                    1 / speed["ours bf16"],
                    1.5,
                    at_most=False,
                )
            )
    return rows


def _training(size: Size) -> dict:
    torch.manual_seed(0)
    model = GPT(size.config())
    theirs = same_in_transformers(model)
    tokens = torch.randint(0, size.vocab_size, (size.batch, size.seq_len))
    require_same_loss(model, theirs, tokens)
    our_step, their_step = _our_step(model, tokens), _their_step(theirs, tokens)
    contenders = {
        "ours": our_step,
        "ours bf16": lambda: our_step(bf16=True),
        "transformers fair": lambda: their_step("gelu_pytorch_tanh"),
        "transformers default": lambda: their_step("gelu_new"),
        "floor": products_step(model, size),
    }
    activations = {
        "ours": "",
        "transformers fair": "gelu_pytorch_tanh",
        "transformers default": "gelu_new",
    }
    return {
        **size.facts(),
        **{
            "parameters": model.num_parameters(),
            "batch": size.batch,
            "seq_len": size.seq_len,
            "rounds": size.rounds,
        },
        **summary(paired(contenders, size.rounds), size.batch * size.seq_len),
        "peak_memory_bytes": {
            name: peak_bytes(size, activation) for name, activation in activations.items()
        },
    }


#: what is timed -> the kernels that it uses
KERNELS = {
    "fp32 step": ("products", "cross-entropy"),
    "bf16 step": ("attention", "cross-entropy"),
}


def _kernels(size: Size) -> list[dict]:
    """How much slower each is without one of our kernels, taking turns."""
    torch.manual_seed(0)
    model = GPT(size.config())
    step = _our_step(model, torch.randint(0, size.vocab_size, (size.batch, size.seq_len)))
    acts = {"fp32 step": step, "bf16 step": lambda: step(bf16=True)}

    def turned_off(kernel: str, act: Callable) -> None:
        with patch.dict(kernels.ON, {kernel: False}):
            act()

    rows = []
    for what, act in acts.items():
        off = {kernel: partial(turned_off, kernel, act) for kernel in KERNELS[what]}
        timing = paired({"with": act, **off}, size.rounds)
        rows += [
            {
                **size.facts(),
                "what": what,
                "kernel": kernel,
                "time_without": timing.ratio(kernel, "with"),
            }
            | {"of_each_round": timing.ratios(kernel, "with")}
            for kernel in off
        ]
    return rows


def summary(timing: Paired, tokens: int) -> dict:
    """Seconds and tokens/s of each contender, and its slowdown against ours."""
    return {
        "seconds": {name: timing.median_s(name) for name in timing.seconds},
        "tokens_per_s": {name: tokens / timing.median_s(name) for name in timing.seconds},
        "speedup": {name: timing.ratio(name, "ours") for name in timing.seconds if name != "ours"},
        "speedup_of_each_round": {
            name: timing.ratios(name, "ours") for name in timing.seconds if name != "ours"
        },
    }


def same_in_transformers(model: GPT) -> transformers.GPT2LMHeadModel:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return transformers.GPT2LMHeadModel.from_pretrained(folder, attn_implementation="sdpa")


def require_same_loss(model: GPT, theirs, tokens: Tensor) -> None:
    with torch.no_grad():
        ours = model(tokens[:, :-1], tokens[:, 1:]).item()
        other = theirs(input_ids=tokens, labels=tokens, use_cache=False).loss.item()
    if abs(ours - other) > 1e-4:
        raise RuntimeError(
            f"our loss is {ours}, transformers' {other}: the models differ and cannot be compared"
        )


def _our_step(model: GPT, tokens: Tensor) -> Callable:
    optimizer = build_optimizer(model, OptimizerConfig())

    def step(bf16: bool = False) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _their_step(model, tokens: Tensor) -> Callable:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model.train()

    def step(activation: str) -> None:
        for block in model.transformer.h:
            block.mlp.act = ACT2FN[activation]
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def products_step(model: GPT, size: Size) -> Callable[[], None]:
    """Only the matrix products of one training step.
    For each weight these are one forward and two backward (input and weight gradient), for
    attention two forward and four backward, at half size."""
    weights = [
        p.detach()
        for name, p in model.named_parameters()
        if p.dim() == 2 and "embedding" not in name
    ]
    weights.append(model.head_weight.detach())
    widths = {width for weight in weights for width in weight.shape}
    x, y = (
        {width: torch.randn(size.batch * size.seq_len, width) for width in widths} for _ in range(2)
    )
    d_weight = {tuple(w.shape): torch.empty_like(w) for w in weights}
    heads = max(1, size.batch * model.config.n_head // 2)
    q, gathered = (torch.randn(heads, size.seq_len, model.config.d_head) for _ in range(2))
    p, scores = (torch.randn(heads, size.seq_len, size.seq_len) for _ in range(2))

    @torch.no_grad()
    def products() -> None:
        for w in weights:
            n_out, n_in = w.shape
            torch.mm(x[n_in], w.t(), out=y[n_out])
            torch.mm(x[n_out], w, out=y[n_in])
            torch.mm(x[n_out].t(), x[n_in], out=d_weight[n_out, n_in])
        for _ in range(3 * model.config.n_layer):
            torch.bmm(q, q.transpose(1, 2), out=scores)
            torch.bmm(p, q, out=gathered)

    return products


def peak_bytes(size: Size, activation: str) -> int:
    """The most memory that transformers with an activation (ours: without one) has at a time.
    It is its weights, and what three training steps allocate, optimizer states among it."""
    model = GPT(size.config())
    tokens = torch.randint(0, size.vocab_size, (size.batch, size.seq_len))
    step = (
        partial(_their_step(same_in_transformers(model), tokens), activation)
        if activation
        else _our_step(model, tokens)
    )
    return 4 * model.num_parameters() + max(allocated_bytes(lambda: [step() for _ in range(3)])[1])


def show(result: dict) -> None:
    for row in result["training"]:
        title = (
            f"{row['size']}, training: {row['parameters'] / 1e6:.1f} M parameters, "
            f"{row['batch']} x {row['seq_len']} tokens a step, vocabulary {row['vocab_size']}, "
            f"median of {row['rounds']} rounds"
        )
        table(
            title,
            ("", "tokens/s", "ms", "time / ours", "range over rounds", "peak MiB"),
            _rows(row),
        )
    rows = [
        (
            f"{row['what']} {row['size']}",
            row["kernel"],
            f"{row['time_without']:.3f}",
            _span(row["of_each_round"]),
        )
        for row in result["kernels"]
    ]
    table("our kernels", ("", "kernel", "time without / with", "range over rounds"), rows)


def _rows(row: dict) -> list[tuple[str, ...]]:
    rows = []
    for name, seconds in row["seconds"].items():
        ratio = (
            ("1", "")
            if name == "ours"
            else (f"{row['speedup'][name]:.3f}", _span(row["speedup_of_each_round"][name]))
        )
        memory = row.get("peak_memory_bytes", {}).get(name)
        peak = f"{memory / 2**20:,.0f}" if memory else ""
        rows.append(
            (name, f"{row['tokens_per_s'][name]:,.0f}", f"{1e3 * seconds:,.1f}", *ratio, peak)
        )
    return rows


def _span(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


if __name__ == "__main__":
    args = arguments(__doc__).parse_args()
    raise SystemExit(finish(measure(args.quick), show, args.json))
