"""Whether so many ranks can share the work that options ask for. Without torch, for `submit` too.

misfit(args, 32)     # None, or the values, the rule that they break and the remedy
"""

from __future__ import annotations

import argparse
import math

from aiscale.train.presets import is_ours, shape_of


def misfit(args: argparse.Namespace, ranks: int) -> str | None:
    """Why these options and ranks do not fit, or None."""
    shape = shape_of(args.model)
    tp, pp = getattr(args, "tp", 1), getattr(args, "pp", 1)
    if ranks % (tp * pp):
        return f"{ranks} ranks are no multiple of --tp {tp} x --pp {pp}: change one of them"
    if shape.heads % tp:
        return f"--tp {tp}: it must divide the {shape.heads} heads of {args.model}: lower it"
    if pp > shape.layers:
        return f"--pp {pp}: {args.model} has {shape.layers} layers, one a stage at most: lower it"
    copies = ranks // (tp * pp)
    together = copies * args.micro_batch
    if args.batch % together:
        rule = f"{copies} copies of the model x --micro-batch {args.micro_batch}"
        smallest = math.ceil(args.batch / together) * together
        return f"--batch is {args.batch}: it must be a multiple of {rule}, such as {smallest}"
    if getattr(args, "interval", 1) < 1:
        return f"--interval {args.interval}: every step is dense at 1, which is the least"
    if getattr(args, "stage", 0) > 0 and args.optimizer == "lamb":
        rule = "DeepSpeed cuts the tensors whose norms LAMB needs: take --stage 0, or fsdp"
        return f"--optimizer lamb with --stage {args.stage}: {rule}"
    if hasattr(args, "virtual_stages"):
        return not_of_megatron(args) or not_interleaved(args, copies) or not_mixed(args, ranks)
    if hasattr(args, "tp"):
        return not_of_tp_pp(args)
    return None


def not_of_tp_pp(args: argparse.Namespace) -> str | None:
    """What torch's own tensor and pipeline parallelism does not do here."""
    if args.pp > 1 and shape_of(args.model).tied:
        rule = f"the head of {args.model} is its embedding, which the last stage lacks"
        return f"--pp {args.pp}: {rule}: take --pp 1, or the trainer megatron"
    if args.bf16:
        return "--bf16: tp_pp computes in fp32 and fp64 only: leave it out, or take megatron"
    if args.evaluate_every:
        option = f"--evaluate-every {args.evaluate_every}"
        return f"{option}: tp_pp has no evaluation: leave it out, or take megatron"
    return None


def not_of_megatron(args: argparse.Namespace) -> str | None:
    """What Megatron-Core cannot do, or does not do here."""
    shape, tp, pp = shape_of(args.model), args.tp, args.pp
    if not is_ours(args.model):
        return f"--model {args.model}: Megatron-Core has a GPT of its own: take fsdp or zero"
    if args.fp64:
        return "--fp64: Megatron-Core computes the loss in fp32: leave it out, or take tp_pp"
    if args.optimizer == "lamb":
        return "--optimizer lamb: Megatron-Core has Adam: take adamw, or train by ddp or fsdp"
    if args.compile:
        return "--compile: Megatron-Core's blocks are not compiled here: leave it out"
    if args.bf16 and args.fp16:
        return "--bf16 --fp16: a run has one precision: leave one out"
    if shape.layers % (pp * args.virtual_stages):
        stages = f"--pp {pp} x --virtual-stages {args.virtual_stages}"
        return f"{stages}: must divide the {shape.layers} layers of {args.model}: lower one of them"
    if args.sequence_parallel and (tp == 1 or args.length % tp):
        rule = f"--tp {tp} must be more than 1 and divide --length {args.length}: change one"
        return f"--sequence-parallel: {rule}"
    return None


def not_interleaved(args: argparse.Namespace, copies: int) -> str | None:
    """What Megatron-Core's interleaved schedule cannot do."""
    option = f"--virtual-stages {args.virtual_stages}"
    if args.virtual_stages == 1:
        return None
    if args.pp < 3:
        rule = f"with --pp {args.pp} both neighbours are one rank and messages cross: take 3"
        return f"{option}: {rule}"
    micro_batches = args.batch // (copies * args.micro_batch)
    if micro_batches % args.pp:
        rule = f"--pp {args.pp} must divide a copy's {micro_batches} micro-batches: change --batch"
        return f"{option}: {rule}"
    return None


def not_mixed(args: argparse.Namespace, ranks: int) -> str | None:
    """Why these ranks cannot share a mixture's experts."""
    experts, ep = args.experts, args.ep
    if not experts:
        rule = f"there are no experts to share: add --experts {2 * ep}, or take --ep 1"
        return f"--ep {ep}: {rule}" if ep > 1 else None
    if not 1 <= args.top_k <= experts:
        rule = f"of --experts {experts} a token takes 1 to {experts}: change one of them"
        return f"--top-k {args.top_k}: {rule}"
    if experts % ep:
        return f"--ep {ep}: it must divide --experts {experts}: change one of them"
    stage = ranks // args.pp
    if stage % ep:
        rule = f"it must divide tp x dp = {ranks} ranks / --pp {args.pp} = {stage}: lower it"
        return f"--ep {ep}: {rule}"
    if args.tp > 1 and not args.sequence_parallel:
        rule = "Megatron-Core then wants --sequence-parallel: add it, or take --tp 1"
        return f"--experts {experts} with --tp {args.tp}: {rule}"
    return None


def other_experts(before: dict, args: argparse.Namespace) -> str | None:
    """Why a run with the options `before` cannot go on with these experts on a rank, or None.

    Megatron-Core has an optimizer of their own for experts where ep > 1, and where etp, which is 1
    here, is not tp.
    """
    if not getattr(args, "experts", 0):
        return None
    was, now = [(grid["ep"], grid["tp"]) for grid in (before, vars(args))]
    if (max(was) > 1) == (max(now) > 1):
        return None
    grids = "has --ep {} --tp {}, not --ep {} --tp {}".format(*was, *now)
    rule = "Megatron-Core goes on if both have one above 1, or neither"
    return f"--save {args.save} {grids}; {rule}: choose another folder"
