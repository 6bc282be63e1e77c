"""Faults planted in training scripts: each is a few lines of a correct script, changed.

Scripts are those of workshop/your_own and, in other styles, of tests/referee_scripts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
FOLDERS = (HERE.parent / "workshop" / "your_own", HERE / "referee_scripts")

AVERAGE = "            dist.all_reduce(weight.grad, dist.ReduceOp.AVG)\n"
LOOP = "        for weight in model.parameters():\n" + AVERAGE
CLIP = "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
CUT = "    cut(model, my_stage, args.pp)\n"


@dataclass(frozen=True)
class Fault:
    script: str
    changes: tuple[tuple[str, str], ...]  #: (old lines, new lines)
    what: str  #: where the verdict says that the runs part; "" for a warning
    cause: str  #: words of the cause, or of the warning
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    steps: int = 2


def _ranks(changes, what, cause, **more) -> Fault:
    return Fault("train_ranks.py", changes, what, cause, **more)


GRID = ("--tp", "{min(2,N)}", "--pp", "{min(2,N)}")
TENSOR = ("--tp", "{min(2,N)}", "--pp", "1")
STAGES = ("--tp", "1", "--pp", "{min(2,N)}")
EACH = ("{16//N}",)

FAULTS = {
    "summed": _ranks(
        ((AVERAGE, AVERAGE.replace("AVG", "SUM")),),
        "gradient before clipping",
        "summed over ranks, not averaged",
    ),
    "never_averaged": _ranks(((LOOP, ""),), "gradient before clipping", "never averaged"),
    "one_layer_not_averaged": _ranks(
        ((AVERAGE, f"            if weight is not model.blocks[2].up.weight:\n    {AVERAGE}"),),
        "gradient before clipping",
        "blocks.2.up.weight: each rank's own gradient, never averaged",
    ),
    "clipped_first": _ranks(
        ((CLIP, ""), (LOOP, CLIP + LOOP)), "gradient before clipping", "clipped before the average"
    ),
    "seeded_by_rank": _ranks(
        (("torch.manual_seed(0)", "torch.manual_seed(rank)"),),
        "initial weights",
        "drew different initial weights",
    ),
    "other_order": _ranks(
        (
            (
                LOOP,
                LOOP.replace(
                    "model.parameters()", "list(model.parameters())[:: -1 if rank else 1]"
                ),
            ),
        ),
        "order of collectives",
        "another order",
    ),
    "old_gradients": _ranks(
        (
            (
                "        optimizer.zero_grad()\n",
                "        if world_size == 1:\n            optimizer.zero_grad()\n",
            ),
        ),
        "gradient before clipping",
        "the step before",
    ),
    "learning_rate": _ranks(
        (("lr=args.lr)", "lr=args.lr * world_size)"),), "learning rate", "number of ranks"
    ),
    "one_rank_alone": _ranks(
        (
            (
                CLIP,
                "        if rank == 1:\n            model.head[1].weight.grad.mul_(1.1)\n" + CLIP,
            ),
        ),
        "gradient before clipping",
        "rank 1 alone",
    ),
    "same_samples": Fault(
        "train_ddp.py",
        (("[rank::world_size]]", "[: size // world_size]]"),),
        "samples",
        "the same samples as rank 0",
    ),
    "whole_batch": Fault(
        "train_ddp.py", (("[rank::world_size]]", "]"),), "", "compute the same 16 samples"
    ),
    "sent_each_micro_batch": Fault(
        "train_ddp.py",
        (("nullcontext() if last else model.no_sync()", "nullcontext()"),),
        "",
        "for 4 micro-batches",
    ),
    "not_divided": Fault(
        "train_ddp.py",
        ((" / len(micro_batches)\n", "\n"),),
        "loss",
        "with --micro-batch 4 on one rank it is gone",
    ),
    "divided_by_ranks_too": Fault(
        "train_ddp.py",
        ((" / len(micro_batches)\n", " / len(micro_batches) / world_size\n"),),
        "loss",
        "off by the number of ranks: with --micro-batch 4 on one rank it is the same",
    ),
    "sent_too_early": Fault(
        "train_fsdp.py",
        (
            (
                "set_requires_gradient_sync(i + 1 == len(micro_batches))",
                "set_requires_gradient_sync(i == 0)",
            ),
        ),
        "gradient before clipping",
        "",
    ),
    "clipped_by_own_norm": Fault(
        "train_fsdp.py",
        (
            (
                CLIP,
                "        norm = sum(w.grad.to_local().square().sum() "
                "for w in model.parameters()).sqrt()\n"
                "        for w in model.parameters():\n"
                "            w.grad.to_local().mul_((1 / norm).clamp(max=1))\n",
            ),
        ),
        "gradient that the optimizer uses",
        "the norm of its own slices",
    ),
    "all_heads_counted": Fault(
        "train_tp_pp.py",
        (
            (
                CUT,
                "    for block in model.blocks:\n        block.head_width = 16 // args.tp\n" + CUT,
            ),
        ),
        "activation",
        "of which each rank has a part",
        TENSOR,
    ),
    "norm_of_a_stage": Fault(
        "train_tp_pp.py",
        (("    dist.all_reduce(squares, group=pipeline)\n", ""),),
        "gradient that the optimizer uses",
        "clipped by the norm of its own",
        STAGES,
    ),
    "norm_of_own_experts": Fault(
        "train_experts.py",
        (("    dist.all_reduce(experts)\n", ""),),
        "gradient that the optimizer uses",
        "another gradient",
    ),
    "rows_in_another_order": Fault(
        "train_experts.py",
        (
            (
                "from experts import Experts\n",
                "import experts\nfrom experts import Experts\n\n"
                "send = experts.exchange\n"
                "experts.exchange = lambda rows, *counts: send(rows.flip(0), *counts)\n",
            ),
        ),
        "activation",
        "share out parts",
    ),
    "copies_not_averaged": Fault(
        "train_tp_pp.py",
        (
            (
                "            dist.all_reduce(mine, dist.ReduceOp.AVG, group=data)\n",
                "            pass\n",
            ),
        ),
        "gradient before clipping",
        "never averaged",
        ("--tp", "1", "--pp", "1"),
    ),
    "divided_twice": Fault(
        "train_zero.py",
        (("engine.backward(part)", "engine.backward(part / len(micro_batches))"),),
        "loss",
        "number",
    ),
    "batch_norm": Fault(
        "mlp.py", (("nn.LayerNorm(32)", "nn.BatchNorm1d(32)"),), "activation", "BatchNorm", EACH
    ),
    "wrapper_bypassed": Fault(
        "mlp.py",
        (("loss_fn(model(a), b)", "loss_fn(model.module(a), b)"),),
        "gradient",
        "never averaged",
        EACH,
    ),
    "divided_by_ranks": Fault(
        "mlp.py",
        (("/ accumulate", "/ accumulate / world"),),
        "loss",
        "off by the number of ranks",
        EACH,
    ),
    "no_sampler": Fault(
        "mlp.py",
        (("sampler=sampler", "sampler=None"),),
        "samples",
        "the same samples as rank 0",
        EACH,
    ),
    "last_batch_filled": Fault(
        "mlp.py",
        (("n = 64", "n = 17"), ("accumulate = 2", "accumulate = 1")),
        "samples",
        "filled up",
        EACH,
    ),
    "same_order_each_epoch": Fault(
        "mlp.py",
        (
            ("    sampler.set_epoch(epoch)\n", ""),
            ("n = 64", "n = 32"),
            ("accumulate = 2", "accumulate = 1"),
        ),
        "",
        "set_epoch",
        EACH,
        steps=6,
    ),
    "same_masks": Fault(
        "mlp.py",
        (("nn.Dropout(0)", "nn.Dropout(0.1)"), ("torch.manual_seed(100 + rank)", "")),
        "",
        "masks",
        EACH,
    ),
    "to_empty_buffer": Fault(
        "on_meta.py",
        (
            (
                "        model.freq.copy_(torch.linspace(0, 1, 32))\n",
                "        model.freq.fill_(7e9)\n",
            ),
        ),
        "initial buffers",
        "what memory held",
    ),
    "to_empty_untied": Fault(
        "on_meta.py",
        (
            (
                "model.head.weight = model.embed.weight",
                "model.head.weight = nn.Parameter(torch.empty(64, 32))",
            ),
        ),
        "gradient",
        "copies here",
    ),
    "stages_not_tied": Fault(
        "pipeline_by_hand.py",
        (("    if world > 1:\n", "    if False:\n"),),
        "gradient",
        "are not added",
    ),
    "accelerate_clips_first": Fault(
        "with_accelerate.py",
        (("if accelerator.sync_gradients:", "if True:"),),
        "gradient",
        "",
        EACH,
    ),
    "mean_of_means": Fault(
        "hugging_face.py",
        (("loss = mean_over_all(out, batch)", "loss = out.loss"),),
        "loss",
        "mean of means",
        EACH,
    ),
    "unequal_shares": Fault(
        "plain.py",
        (("(step + 1) * 16, world", "(step + 1) * 16 - 1, world"),),
        "loss",
        "[8, 7] samples: a mean of means",
    ),
    "tp_reduction_forgotten": Fault(
        "tensor_by_hand.py",
        (("        dist.all_reduce(out)\n", ""),),
        "activation",
        "each rank has a part",
    ),
}


def write(name: str, folder: Path) -> Path:
    """The script with this fault, beside the files that it imports."""
    fault = FAULTS[name]
    return plant(fault.script, fault.changes, folder)


def plant(script: str, changes: tuple[tuple[str, str], ...], folder: Path) -> Path:
    home = next(each for each in FOLDERS if (each / script).exists())
    for beside in home.glob("*.*"):
        if beside.is_file() and beside.name != script:
            (folder / beside.name).symlink_to(beside)
    text = (home / script).read_text()
    for old, new in changes:
        assert old in text, f"{script} has no {old!r}"
        text = text.replace(old, new)
    path = folder / script
    path.write_text(text)
    return path
