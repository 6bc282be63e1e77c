"""Recipes that train transformers' own models: gpt2-xl and GPT-J 6B in full size, and twins of seconds.

aiscale train --recipe gptj-6b-hf-tiny --set parallel.strategy=zero --set parallel.zero_stage=3 --nproc 2
"""

from __future__ import annotations

import dataclasses

from aiscale.config import DataConfig, HFModelConfig, LoopConfig, OptimizerConfig, ParallelConfig, Run
from aiscale.recipes.frontier import gptj_6b
from aiscale.recipes.gpt2 import gpt2_xl
from aiscale.recipes.registry import register


def _full(run: Run, model_type: str, parallel: ParallelConfig) -> Run:
    """`run` with transformers' model in place of ours."""
    ours = run.model
    model = HFModelConfig(
        model_type=model_type,
        n_layer=ours.n_layer,
        n_head=ours.n_head,
        d_model=ours.d_model,
        vocab_size=ours.vocab_size,
        max_seq_len=ours.max_seq_len,
        activation_checkpointing=True,
    )
    return dataclasses.replace(run, name=f"{run.name}-hf", model=model, parallel=parallel)


def _twin(name: str, model_type: str) -> Run:
    return Run(
        name=name,
        model=HFModelConfig(model_type=model_type, n_layer=2, n_head=4, d_model=64, vocab_size=256, max_seq_len=64),
        data=DataConfig(corpus="embedded", tokenizer="byte"),
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=10),
        loop=LoopConfig(steps=100, seq_len=64, global_batch=16, eval_every=50, eval_batches=4),
    )


@register("gpt2-xl-hf")
def gpt2_xl_hf() -> Run:
    """transformers' GPT-2 with 1,557,611,200 parameters, under FSDP.

    The size of OLCF's examples of DDP and FSDP ("AI for Science at Scale", parts 1 and 2); the rest as gpt2-xl.
    """
    return _full(gpt2_xl(), "gpt2", ParallelConfig(strategy="fsdp"))


@register("gptj-6b-hf")
def gptj_6b_hf() -> Run:
    """transformers' GPT-J 6B, 6,050,882,784 parameters as published, under ZeRO-3.

    OLCF's example of ZeRO on Frontier. One norm a layer, no biases in attention, one in the head: what our own GPT of
    the recipe gptj-6b cannot hold; the rest as there.
    """
    return _full(gptj_6b(), "gptj", ParallelConfig(strategy="zero", zero_stage=3))


@register("gpt2-xl-hf-tiny")
def gpt2_xl_hf_tiny() -> Run:
    """gpt2-xl-hf shrunken to seconds: 2 layers of 64 on the embedded corpus. Ours."""
    return _twin("gpt2-xl-hf-tiny", "gpt2")


@register("gptj-6b-hf-tiny")
def gptj_6b_hf_tiny() -> Run:
    """gptj-6b-hf shrunken to seconds: 2 layers of 64 on the embedded corpus. Ours."""
    return _twin("gptj-6b-hf-tiny", "gptj")
