"""Faults as people have reported them of their own scripts, planted in scripts of seven styles.

    python tests/referee_reports.py             # all of them, as a table
    python tests/referee_reports.py trainer     # those whose name contains the word

They were written down before anybody had seen what the referee says about them. A fault is found
if the runs part or a warning is given; in place, if step, what and where fit; its cause is named,
if the cause has these words.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from aiscale.measure.referee.judge import Question, judge
from aiscale.measure.referee.verdict import PARTS, Verdict
from referee_faults import EACH, STAGES, TENSOR, plant

TRAINER = ("--output_dir", "out", "--use_cpu", "--ddp_backend", "gloo", "--max_steps", "3")
TRAINER += ("--report_to", "none", "--save_strategy", "no", "--disable_tqdm", "true")
TRAINER += ("--per_device_train_batch_size", "{8//N}", "--gradient_accumulation_steps", "2")


@dataclass(frozen=True)
class Report:
    style: str
    script: str
    changes: tuple[tuple[str, str], ...]  #: (old lines, new lines)
    what: str  #: a pattern in what parts first
    where: str  #: a pattern in the lines "what: where" and "where:"
    cause: str  #: a pattern in the cause
    arguments: tuple[str, ...] = ()
    step: int = 0
    ranks: int = 2


AVERAGED = "        dist.all_reduce(weight.grad)\n        weight.grad /= world\n"
LOOP = "        for weight in model.parameters():\n"
LANGUAGE = ("--micro-batch", "4")
NOT_AVERAGED = "never averaged"

REPORTS = {
    # a plain loop
    "plain: a copy is reduced": Report(
        "plain",
        "plain.py",
        (("dist.all_reduce(weight.grad)", "dist.all_reduce(weight.grad.clone())"),),
        "gradient before",
        "0.weight",
        NOT_AVERAGED,
    ),
    "plain: shuffled with a seed by rank": Report(
        "plain",
        "train_ranks.py",
        (("manual_seed(epoch)", "manual_seed(epoch + rank)"),),
        "samples",
        "ranks .1.",
        "order of its own|another order|own order",
    ),
    "plain: reduced only if large": Report(
        "plain",
        "train_ranks.py",
        ((LOOP, LOOP + "            if weight.grad.norm() < 0.05:\n                continue\n"),),
        "order of collectives",
        "rank",
        "condition on the rank or its data|another order",
    ),
    "plain: one rank loads other weights": Report(
        "plain",
        "plain.py",
        (("optimizer = ", "if rank == 1:\n    nn.init.ones_(model[2].bias)\noptimizer = "),),
        "initial weights",
        "2.bias.*rank",
        "different initial weights",
    ),
    "plain: step on rank 0 alone": Report(
        "plain",
        "plain.py",
        (("    optimizer.step()\n", "    if rank == 0:\n        optimizer.step()\n"),),
        "optimizer steps",
        r"\[1\]",
        "take no step",
    ),
    "plain: averaged every second step": Report(
        "plain",
        "plain.py",
        ((AVERAGED, "        if step % 2 == 0:\n" + AVERAGED.replace("        ", " " * 12)),),
        "gradient before",
        "0.weight",
        NOT_AVERAGED,
        step=1,
    ),
    "plain: the last weight left out": Report(
        "plain",
        "train_ranks.py",
        ((LOOP, LOOP.replace("model.parameters()", "list(model.parameters())[:-1]")),),
        "gradient before",
        "head",
        NOT_AVERAGED,
    ),
    "plain: sum divided by a fixed number": Report(
        "plain",
        "plain.py",
        (("** 2).mean()", "** 2).sum().div(64)"),),
        "loss",
        "0.5 times",
        "number of ranks",
    ),
    "plain: the loss itself is reduced": Report(
        "plain",
        "plain.py",
        (
            (
                "    ((model(x[share]) - y[share]) ** 2).mean().mul(100).backward()",
                "    loss = ((model(x[share]) - y[share]) ** 2).mean().mul(100)\n"
                "    torch.distributed.nn.functional.all_reduce(loss).backward()",
            ),
            ("from torch import nn", "import torch.distributed.nn\nfrom torch import nn"),
        ),
        "loss",
        "2 times",
        "number of ranks",
    ),
    # DDP
    "ddp: forward inside no_sync": Report(
        "DDP",
        "mlp.py",
        (
            (
                "        with nullcontext() if last else model.no_sync():\n"
                "            loss = loss_fn(model(a), b) / accumulate\n",
                "        with model.no_sync():\n"
                "            loss = loss_fn(model(a), b) / accumulate\n"
                "        with nullcontext() if last else model.no_sync():\n",
            ),
        ),
        "gradient",
        "0.weight",
        NOT_AVERAGED,
        EACH,
    ),
    "ddp: a hook that sums": Report(
        "DDP",
        "mlp.py",
        (
            (
                "optimizer = ",
                "def summed(state, bucket):\n"
                "    work = dist.all_reduce(bucket.buffer(), async_op=True)\n"
                "    return work.get_future().then(lambda done: done.value()[0])\n\n\n"
                "model.register_comm_hook(None, summed)\noptimizer = ",
            ),
        ),
        "gradient",
        "0.weight",
        "summed over ranks",
        EACH,
    ),
    "ddp: centre of a rank's own": Report(
        "DDP",
        "contrastive.py",
        (("    dist.all_reduce(centre)\n", "    centre *= world\n"),),
        "next buffers",
        "centre",
        "own samples",
    ),
    "ddp: mean of means over tokens": Report(
        "DDP",
        "language.py",
        (
            (
                "                loss = total * world / tokens\n",
                "                loss = total / (part[:, 1:] != 0).sum() / len(parts)\n",
            ),
        ),
        "loss",
        "times",
        "mean of means",
        LANGUAGE,
    ),
    "ddp: gathered without a gradient": Report(
        "DDP",
        "contrastive.py",
        (
            (
                "all_right = torch.cat(all_gather(right))",
                "parts = [torch.empty_like(right) for _ in range(world)]\n"
                "    dist.all_gather(parts, right)\n    parts[rank] = right\n"
                "    all_right = torch.cat(parts)",
            ),
            ("from torch.distributed.nn.functional import all_gather\n", ""),
        ),
        "gradient",
        "right",
        "without a gradient|gathered|backward",
    ),
    "ddp: labels not moved by rank": Report(
        "DDP",
        "contrastive.py",
        ((" + rank * len(left)", ""),),
        "loss",
        "times",
        "rank 1|outputs of the model agree",
    ),
    "ddp: compared within a rank": Report(
        "DDP",
        "contrastive.py",
        (("torch.cat(all_gather(right))", "right"), (" + rank * len(left)", "")),
        "loss",
        "times",
        "own samples|outputs of the model agree",
    ),
    "ddp: a head outside the wrapper": Report(
        "DDP",
        "two_models.py",
        (("head = DistributedDataParallel(nn.Linear(64, 5))", "head = nn.Linear(64, 5)"),),
        "gradient",
        "weight.*bias|bias.*weight",
        NOT_AVERAGED,
    ),
    "ddp: a head changed after wrapping": Report(
        "DDP",
        "mlp.py",
        (
            (
                "optimizer = ",
                "torch.manual_seed(5)\nmodel.module[4] = nn.Linear(32, 5)\noptimizer = ",
            ),
            ("nn.Sequential(*layers))", "nn.Sequential(*layers), find_unused_parameters=True)"),
        ),
        "gradient",
        "4.weight",
        NOT_AVERAGED,
        EACH,
    ),
    "ddp: a schedule by steps of a rank": Report(
        "DDP",
        "language.py",
        (("T_max=steps)", "T_max=steps * world)"),),
        "learning rate",
        "on one rank",
        "number of ranks|schedule",
        (*LANGUAGE, "--scheduler"),
        1,
    ),
    "ddp: clipped to a number by rank": Report(
        "DDP",
        "language.py",
        (("model.parameters(), 1.0", "model.parameters(), 1.0 / world"),),
        "gradient that the optimizer uses",
        "embed.weight",
        "clip",
        LANGUAGE,
    ),
    # FSDP2
    "fsdp: the optimizer knows old weights": Report(
        "FSDP",
        "train_fsdp.py",
        (
            ("    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)\n", ""),
            (
                "    policy = ",
                "    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)\n    policy = ",
            ),
        ),
        "",
        "",
        "other tensors|not those of the model",
    ),
    "fsdp: divided by the ranks once more": Report(
        "FSDP",
        "on_meta.py",
        (("    loss.backward()\n", "    (loss / world).backward()\n"),),
        "loss",
        "0.5 times",
        "number of ranks",
    ),
    "fsdp: an ignored weight": Report(
        "FSDP",
        "on_meta.py",
        (("fully_shard(model)\n", "fully_shard(model, ignored_params={model.embed.weight})\n"),),
        "gradient",
        "embed.weight",
        NOT_AVERAGED,
    ),
    "ddp: gradients cleared in each micro-batch": Report(
        "DDP",
        "train_ddp.py",
        (
            (
                "                part.backward()\n",
                "                optimizer.zero_grad()\n                part.backward()\n",
            ),
        ),
        "gradient before",
        "weight",
        "micro-batch",
    ),
    "fsdp: the sum is never sent": Report(
        "FSDP",
        "train_fsdp.py",
        (
            (
                "set_requires_gradient_sync(i + 1 == len(micro_batches))",
                "set_requires_gradient_sync(world_size == 1)",
            ),
        ),
        "gradient",
        "weight",
        "no gradient|never|no weight has a gradient",
    ),
    # tensor and pipeline parallelism
    "tensor: its ranks read different samples": Report(
        "TP and pipeline",
        "train_tp_pp.py",
        (
            ('args.batch, mesh.get_local_rank("dp"), dp)', "args.batch)"),
            ("stage, args.batch // dp", "stage, args.batch // world_size"),
        ),
        "samples",
        "",
        "share the model",
        TENSOR,
    ),
    "tensor: the norm counts copies twice": Report(
        "TP and pipeline",
        "train_tp_pp.py",
        (
            (
                "whole = [g.full_tensor() if",
                "whole = [g.to_local() if",
            ),
            (
                "group=pipeline)\n    torch.nn",
                "group=pipeline)\n    dist.all_reduce(squares)\n    torch.nn",
            ),
        ),
        "gradient that the optimizer uses",
        "weight",
        "clipped by .*norm|norm",
        TENSOR,
    ),
    "tensor: no sum in the backward pass": Report(
        "TP and pipeline",
        "tensor_by_hand.py",
        (("        dist.all_reduce(gradient)\n", ""),),
        "gradient",
        "norm",
        "backward|never averaged|not summed",
    ),
    "tensor: summed twice in the backward pass": Report(
        "TP and pipeline",
        "tensor_by_hand.py",
        (
            (
                "    @staticmethod\n    def backward(context, gradient):\n"
                "        return gradient\n",
                "    @staticmethod\n    def backward(context, gradient):\n"
                "        gradient = gradient.clone()\n"
                "        dist.all_reduce(gradient)\n        return gradient\n",
            ),
        ),
        "gradient",
        "0.",
        "backward|number of ranks",
    ),
    "tensor: a bias added by each rank": Report(
        "TP and pipeline",
        "tensor_by_hand.py",
        (
            ("nn.Linear(4 * width, width, bias=False)", "nn.Linear(4 * width, width)"),
            ("hidden, width, bias=False)", "hidden, width)"),
            (
                "            self.down.weight.copy_",
                "            self.down.bias.copy_(down.bias)\n            self.down.weight.copy_",
            ),
        ),
        "activation",
        "0",
        "bias|each rank has a part",
    ),
    "tensor: slices of another rank": Report(
        "TP and pipeline",
        "tensor_by_hand.py",
        (("chunk(world, 1)[rank]", "chunk(world, 1)[world - 1 - rank]"),),
        "activation",
        "0",
        "each rank has a part|slice",
    ),
    "tensor: averaged over all ranks": Report(
        "TP and pipeline",
        "train_tp_pp.py",
        (
            (
                "dist.all_reduce(mine, dist.ReduceOp.AVG, group=data)",
                "dist.all_reduce(mine, dist.ReduceOp.AVG)",
            ),
        ),
        "gradient before",
        "query|key|value|up|out|down",
        "slices",
        TENSOR,
    ),
    "pipeline: layers dealt out in turn": Report(
        "TP and pipeline",
        "train_tp_pp.py",
        (("i * stages // len(model.blocks) != stage", "i % stages != stage"),),
        "activation",
        "blocks.2|blocks.1",
        "order|goes into|before it",
        STAGES,
    ),
    "pipeline: tied gradients averaged": Report(
        "TP and pipeline",
        "pipeline_by_hand.py",
        (("weight.grad)\n    optimizer", "weight.grad, dist.ReduceOp.AVG)\n    optimizer"),),
        "gradient",
        "embed.weight|head.weight",
        "averaged|half|0.5 times|added",
    ),
    "pipeline: sent in half precision": Report(
        "TP and pipeline",
        "layers_by_hand.py",
        (
            (
                "dist.send(out.detach(), rank + 1)",
                "dist.send(out.detach().half().float(), rank + 1)",
            ),
        ),
        "activation|samples",
        "3|rank 1",
        "precision|others|before it|goes into",
    ),
    "pipeline: a layer falls off the end": Report(
        "TP and pipeline",
        "layers_by_hand.py",
        (("nn.Linear(16, 4)]\n", "nn.Linear(16, 4), nn.Linear(4, 4)]\n"),),
        "activation|loss|weights",
        "",
        "missing",
    ),
    "sequence: norms not summed": Report(
        "TP and pipeline",
        "sequence_by_hand.py",
        (('if ".up." not in name', 'if ".norm." not in name and ".up." not in name'),),
        "gradient",
        "norm",
        "never averaged|never summed|own",
    ),
    "experts: gradients not divided": Report(
        "TP and pipeline",
        "experts_by_hand.py",
        (
            (
                '        if ".mine." in name:\n            weight.grad /= world\n',
                '        if ".mine." in name:\n            pass\n',
            ),
        ),
        "gradient",
        "mine",
        "2 times as large|number of ranks",
    ),
    # Hugging Face's Trainer
    "trainer: self.model in the loss": Report(
        "Trainer",
        "trainer_tokens.py",
        (("logits = model(input_ids", "logits = self.model(input_ids"),),
        "gradient",
        "weight",
        NOT_AVERAGED,
        TRAINER,
    ),
    "trainer: tokens of a rank alone": Report(
        "Trainer",
        "trainer_tokens.py",
        (
            (
                "torch.manual_seed(0)",
                "args.average_tokens_across_devices = False\ntorch.manual_seed(0)",
            ),
            ("total * self.accelerator.num_processes /", "total /"),
        ),
        "loss",
        "times",
        "mean of means",
        TRAINER,
    ),
    "trainer: a mean of each micro-batch": Report(
        "Trainer",
        "trainer_tokens.py",
        (
            (
                "total * self.accelerator.num_processes / num_items_in_batch",
                "total / (targets != -100).sum() / 2",
            ),
        ),
        "loss",
        "times",
        "mean of means",
        TRAINER,
    ),
    "trainer: not times the number of ranks": Report(
        "Trainer",
        "trainer_tokens.py",
        ((" * self.accelerator.num_processes", ""),),
        "loss",
        "0.5 times",
        "number of ranks",
        TRAINER,
    ),
    "trainer: a loader of one's own": Report(
        "Trainer",
        "trainer_tokens.py",
        (
            (
                "    def compute_loss",
                "    def get_train_dataloader(self):\n        return torch.utils.data.DataLoader(\n"
                "            self.train_dataset,\n"
                "            batch_size=self.args.per_device_train_batch_size,\n"
                "            collate_fn=self.data_collator,\n        )\n\n    def compute_loss",
            ),
        ),
        "samples",
        "rank",
        "same samples",
        TRAINER,
    ),
    "trainer: a learning rate by ranks": Report(
        "Trainer",
        "trainer_tokens.py",
        (("torch.manual_seed(0)", "args.learning_rate *= args.world_size\ntorch.manual_seed(0)"),),
        "learning rate",
        "on one rank",
        "number of ranks",
        TRAINER,
    ),
    "trainer: data made by each rank": Report(
        "Trainer",
        "trainer_tokens.py",
        (
            (
                "torch.Generator().manual_seed(1)",
                "torch.Generator().manual_seed(1 + args.process_index)",
            ),
        ),
        "samples",
        "rank",
        "own data|others",
        TRAINER,
    ),
    # Accelerate
    "accelerate: the model not prepared": Report(
        "Accelerate",
        "with_accelerate.py",
        (
            (
                "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
                "optimizer, loader = accelerator.prepare(optimizer, loader)",
            ),
        ),
        "gradient",
        "0.weight",
        NOT_AVERAGED,
        EACH,
    ),
    "accelerate: the loader not prepared": Report(
        "Accelerate",
        "accelerate_tokens.py",
        (
            (
                "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
                "model, optimizer = accelerator.prepare(model, optimizer)",
            ),
        ),
        "samples",
        "rank",
        "same samples",
        EACH,
    ),
    "accelerate: the model unwrapped": Report(
        "Accelerate",
        "accelerate_tokens.py",
        (("logits = model(", "logits = accelerator.unwrap_model(model)("),),
        "gradient",
        "0.weight",
        NOT_AVERAGED,
        EACH,
    ),
    "accelerate: the schedule prepared": Report(
        "Accelerate",
        "accelerate_tokens.py",
        (("total_iters=6)\n", "total_iters=6)\nscheduler = accelerator.prepare(scheduler)\n"),),
        "learning rate",
        "on one rank",
        "schedule|number of ranks",
        EACH,
        1,
    ),
    "accelerate: times the number of ranks twice": Report(
        "Accelerate",
        "with_accelerate.py",
        (("accelerator.backward(", "accelerator.backward(accelerator.num_processes * "),),
        "loss",
        "2 times",
        "number of ranks",
        EACH,
    ),
    "accelerate: the last batch filled up": Report(
        "Accelerate",
        "accelerate_tokens.py",
        (("96", "17"),),
        "samples",
        "",
        "filled up",
        EACH,
        1,
    ),
    "accelerate: tokens of a rank alone": Report(
        "Accelerate",
        "accelerate_tokens.py",
        (
            (
                "accelerator.reduce((targets != 0).sum())",
                "(targets != 0).sum() * accelerator.num_processes",
            ),
        ),
        "loss",
        "times",
        "mean of means",
        EACH,
    ),
    # ZeRO by hand
    "zero: a weight is not sent": Report(
        "ZeRO",
        "zero_by_hand.py",
        (
            (
                "enumerate(weights):\n        dist.broadcast",
                "enumerate(weights[:-1]):\n        dist.broadcast",
            ),
        ),
        "next weights",
        "3.bias",
        "drifted apart|not sent",
    ),
    "zero: divided by each rank's number of weights": Report(
        "ZeRO",
        "zero_by_hand.py",
        (
            ("        weight.grad /= world\n", "        weight.grad /= len(mine) / 3 * world\n"),
            (
                "nn.LayerNorm(24), nn.SiLU(), nn.Linear(24, 4))",
                "nn.LayerNorm(24), nn.SiLU(), nn.Linear(24, 4, bias=False))",
            ),
        ),
        "gradient",
        "weight",
        "by another number",
        ranks=2,
    ),
}


#: Reports that the referee does not see: one rank that is given the ranks' batches does the same.
#: It tells only that the ranks read other samples than one rank alone.
NOT_SEEN = ("trainer: data made by each rank", "accelerate: the last batch filled up")
#: Files of workshop/clinic/others -> the report whose fault they have.
GIVEN_OUT = {
    "01_loop.py": "plain: a copy is reduced",
    "02_tutorial.py": "ddp: forward inside no_sync",
    "03_pairs.py": "ddp: gathered without a gradient",
    "04_texts.py": "ddp: mean of means over tokens",
    "05_shards.py": "fsdp: an ignored weight",
    "06_columns.py": "tensor: a bias added by each rank",
    "07_stages.py": "pipeline: tied gradients averaged",
    "08_trainer.py": "trainer: self.model in the loss",
    "09_accelerate.py": "accelerate: the schedule prepared",
    "10_zero.py": "zero: a weight is not sent",
}


def ask(report: Report, folder: Path) -> Verdict:
    script = plant(report.script, report.changes, folder)
    question = Question(script, report.arguments, report.ranks, report.step + 2, limit_s=600)
    return judge(question)


def marks(report: Report, verdict: Verdict) -> tuple[bool, bool, bool]:
    """(found, in the right place, with its cause). "Cannot tell" is not found."""
    if verdict.status != PARTS:
        is_named = any(re.search(report.cause, words) for words in verdict.warnings)
        return bool(verdict.warnings), is_named, is_named
    first = verdict.first
    place = f"{first.what}: {first.where} {first.ranks}"
    is_right = first.step == report.step and re.search(report.what, first.what) is not None
    is_right = is_right and re.search(report.where, place) is not None
    return True, is_right, re.search(report.cause, first.cause.words) is not None


def main(words: list[str]) -> None:
    chosen = {name: report for name, report in REPORTS.items() if all(w in name for w in words)}
    sums = [0, 0, 0]
    for name, report in chosen.items():
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            verdict = ask(report, Path(folder))
        got = marks(report, verdict)
        sums = [total + mark for total, mark in zip(sums, got, strict=True)]
        shown = " ".join("yes" if mark else "NO " for mark in got)
        print(f"{shown}  {time.monotonic() - began:4.0f} s  {name}", flush=True)
        if not all(got):
            print(verdict, flush=True)
    print(f"of {len(chosen)}: {sums[0]} found, {sums[1]} in place, {sums[2]} with their cause")


if __name__ == "__main__":
    main(sys.argv[1:])
