"""What a trainer's options mean to the formulas: `aiscale.train.fsdp --model gpt2-xl` as a Run.

run = run_of("fsdp", args)                                # args: of aiscale.train.options
run = planned("megatron", "--model 22b --tp 4 --pp 8")    # the same from words
layout_of(run, 16)                                        # on 16 ranks, for the planner
"""

from __future__ import annotations

import argparse
import math
import shlex
from dataclasses import replace

from aiscale.plan.config import (
    CompressionConfig,
    HFModelConfig,
    LoopConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Run,
)
from aiscale.plan.presets import model_of
from aiscale.train.options import options


def planned(trainer: str, words: str = "") -> Run:
    """What `aiscale train TRAINER WORDS` computes. Raises ConfigError."""
    return run_of(trainer, options(trainer).parse_args(shlex.split(words)))


def run_of(trainer: str, args: argparse.Namespace) -> Run:
    """What the trainer of that name computes with these options. Raises ConfigError."""
    return Run(
        model=_model(trainer, args),
        optimizer=OptimizerConfig(
            name=args.optimizer,
            lr=args.lr,
            min_lr=args.lr if args.min_lr is None else args.min_lr,
            warmup_steps=args.warm_up,
            decay_steps=args.decay_steps or 0,
            beta2=args.beta2,
            weight_decay=args.weight_decay,
            clip_norm=args.clip,
        ),
        parallel=_parallel(trainer, args),
        compression=_compression(trainer, args),
        loop=LoopConfig(
            steps=args.steps,
            seq_len=args.length,
            global_batch=args.batch,
            micro_batch=args.micro_batch,
            precision=precision_of(args),
            checkpoint_every=args.save_every,
            checkpoint_minutes=args.save_minutes if math.isfinite(args.save_minutes) else 0,
            save_last=args.save_every > 0,
            compile=args.compile,
        ),
    )


def _model(trainer: str, args: argparse.Namespace) -> ModelConfig | HFModelConfig:
    model = model_of(args.model, args.recompute)
    if isinstance(model, HFModelConfig):
        return model
    if trainer == "megatron":  # pads the vocabulary, as Megatron-LM does
        multiple = math.lcm(128, args.tp)
        padded = math.ceil(model.vocab_size / multiple) * multiple
        return replace(model, vocab_size=padded, experts=args.experts, top_k=args.top_k)
    return replace(model, fused_qkv=False)


def precision_of(args: argparse.Namespace) -> str:
    for name in ("fp64", "bf16", "fp16"):
        if getattr(args, name, False):
            return name
    return "fp32"


def _parallel(trainer: str, args: argparse.Namespace) -> ParallelConfig:
    if trainer == "zero":
        return ParallelConfig(strategy="zero", zero_stage=args.stage)
    if trainer == "tp_pp":
        return ParallelConfig(strategy="megatron", tp=args.tp, pp=args.pp)
    if trainer == "megatron":
        return ParallelConfig(
            strategy="megatron",
            tp=args.tp,
            pp=args.pp,
            ep=args.ep,
            virtual_stages=args.virtual_stages,
            schedule="interleaved" if args.virtual_stages > 1 else "1f1b",
            sequence_parallel=args.sequence_parallel,
            distributed_optimizer=not args.no_zero1,
        )
    return ParallelConfig(strategy="ddp" if trainer == "radius" else trainer)


def _compression(trainer: str, args: argparse.Namespace) -> CompressionConfig:
    if trainer != "radius":
        return CompressionConfig()
    return CompressionConfig(
        method="radius",
        density=args.density,
        interval=args.interval,
        warmup_steps=args.dense_until,
        whole="vectors",
    )
