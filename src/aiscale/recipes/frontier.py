"""Recipes of what was trained on Frontier (OLCF, "AI for Science at Scale 2"): GPT-J, FORGE, 22B and 175B.

OLCF's examples of DDP, FSDP and ZeRO train transformers' own models: these recipes end in -hf, with twins of seconds.
"""

from __future__ import annotations

import dataclasses

from aiscale.config import DataConfig, HFModelConfig, LoopConfig, ModelConfig, OptimizerConfig, ParallelConfig, Run
from aiscale.recipes.gpt2 import gpt2_xl
from aiscale.recipes.registry import OPENWEBTEXT, OSCAR, register, sizes


@register("gptj-6b")
def gptj_6b() -> Run:
    """GPT-J 6B, OLCF's example of ZeRO on Frontier: 6,051,520,512 parameters here, 6,050,882,784 published.

    Wang and Komatsuzaki 2021, kingoflolz/mesh-transformer-jax, configs/6B_roto_256.json: batch 512 x 2048, 350,000
    steps. Attention and MLP read the same input. Ours differs: GPT-J has one norm a layer where we have two (2 D a
    layer), no biases in attention (4 D a layer) and one in its head (V); it turns 64 of a head's 256 channels, ours
    all. The seed trains on OSCAR.
    """
    return Run(
        model=ModelConfig(
            **sizes(28, 16, 4096),
            vocab_size=50400,
            max_seq_len=2048,
            position="rotary",
            parallel_residual=True,
            tied=False,
            activation_checkpointing=True,
        ),
        data=OSCAR,
        optimizer=OptimizerConfig(lr=1.2e-4, min_lr=1.2e-5, warmup_steps=3000),
        parallel=ParallelConfig(strategy="ddp"),
        loop=LoopConfig(
            steps=350_000, seq_len=2048, global_batch=512, micro_batch=1, precision="bf16", checkpoint_every=500
        ),
    )


def _forge(shape: tuple[int, int, int], lr: float, decay: float, batch: int, micro_batch: int) -> Run:
    return Run(
        model=ModelConfig(
            **sizes(*shape),
            vocab_size=52_000,
            max_seq_len=2048,
            position="rotary",
            tied=False,
            activation_checkpointing=True,
        ),
        data=OPENWEBTEXT,
        optimizer=OptimizerConfig(lr=lr, min_lr=lr / 10, warmup_steps=153, beta2=0.999, weight_decay=decay),
        parallel=ParallelConfig(strategy="ddp"),
        loop=LoopConfig(
            steps=15_300,
            seq_len=2048,
            global_batch=batch,
            micro_batch=micro_batch,
            precision="bf16",
            eval_every=100,
            eval_batches=10,
            checkpoint_every=100,
        ),
    )


@register("forge-s")
def forge_s() -> Run:
    """FORGE-S, printed as 1.44B: GPT-NeoX's architecture, 24 layers of 2064.

    Yin, Dash, Wang and Shankar, SC'23 (OLCF's slide "FORGE Models"), at-aaims/forge, train/configs/forge-s.yml:
    16.8M tokens a step for 15,300 steps, decay 0.01, 1 % warm-up, clip 1, ZeRO-1. The vocabulary of 52,000 is inferred
    from 1.44B. The authors used LAMB at 0.008, down to 6e-5: optimizer.name=lamb optimizer.lr=0.008 (forge-l: 0.006);
    that is no rate for AdamW, which every strategy carries: ours is GPT-3's for this size (Brown et al. 2020, table
    2.1). Their 257B tokens of papers are not public: the corpus is ours.
    """
    return _forge((24, 24, 2064), 2e-4, 0.01, 8192, 16)


@register("forge-m")
def forge_m() -> Run:
    """FORGE-M, printed as 13B: 40 layers of 5120; sources as for forge-s (forge-m.yml, tensor parallel 2)."""
    return _forge((40, 40, 5120), 1e-4, 0.1, 8064, 12)


@register("forge-l")
def forge_l() -> Run:
    """FORGE-L, printed as 25.6B: 48 layers of 6144; sources as for forge-s (forge-l.yml, tensor parallel 2).

    The printed shape makes 22.4B parameters, and the README of at-aaims/forge says so; the slides print 25.6B.
    """
    return _forge((48, 48, 6144), 1e-4, 0.1, 8192, 16)


def _megatron(shape: tuple[int, int, int], batch: int, micro_batch: int) -> Run:
    steps = 100_000 // batch
    return Run(
        model=ModelConfig(**sizes(*shape), vocab_size=50257, max_seq_len=2048, activation_checkpointing=True),
        data=OPENWEBTEXT,
        optimizer=OptimizerConfig(lr=6e-5, min_lr=6e-6, warmup_steps=100 // batch),
        parallel=ParallelConfig(strategy="ddp"),
        loop=LoopConfig(
            steps=steps, seq_len=2048, global_batch=batch, micro_batch=micro_batch, precision="fp16", eval_every=100
        ),
    )


@register("22b")
def gpt_22b() -> Run:
    """The 22B model of OLCF's example of 3D parallelism: 48 layers of 6144, tensor 4 x pipeline 8 on 32 GCDs.

    OLCF's slide "3D Parallelism", and olcf/ai-training-series, launch_gpt22b_srun.frontier: 96 heads (of 64;
    Dash et al. 2023, arXiv:2312.12705, is recalled to have 48), batch 20 for 100,000 samples, Adam 6e-5 to 6e-6, fp16.
    The script decays over 10,000 samples, here over all. The whole model does not fit one device: give it a layout.
    """
    return _megatron((48, 96, 6144), 20, 2)


@register("175b")
def gpt_175b() -> Run:
    """The 175B model on Frontier, GPT-3's shape: 96 layers of 12288, tensor 8 x pipeline 12 in OLCF's script.

    Shape: Brown et al. 2020, table 2.1, and Dash et al. 2023 (arXiv:2312.12705). The rest from olcf/ai-training-series,
    launch_gpt175b_srun.frontier, a demonstration with batch 12; the paper is recalled to have used 640.
    """
    return _megatron((96, 96, 12288), 12, 1)


@register("1t")  # lesson 11 reads it by its name in a published table
def gpt_1t() -> Run:
    """The trillion-parameter model on Frontier: 128 layers of 25600, tensor 8 x pipeline 64 in OLCF's script.

    Shape: olcf/ai-training-series, launch_gpt1T_srun.frontier, as in Dash et al. 2023 (arXiv:2312.12705). The script
    is a demonstration with batch 8; the paper is recalled to have used 1600.
    """
    return _megatron((128, 128, 25600), 8, 1)


# transformers' own models --------------------------------------------------------------------------------------------


def _full(run: Run, model_type: str, parallel: ParallelConfig) -> Run:
    """`run` with transformers' model in place of ours."""
    model = HFModelConfig.like(run.model, model_type, activation_checkpointing=True)
    return dataclasses.replace(run, model=model, parallel=parallel)


def _twin(model_type: str) -> Run:
    return Run(
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
    return _twin("gpt2")


@register("bert-hf-tiny")
def bert_hf_tiny() -> Run:
    """transformers' BERT, an encoder that guesses the 15 % of the tokens that are hidden, in seconds. Ours."""
    return _twin("bert")


@register("t5-hf-tiny")
def t5_hf_tiny() -> Run:
    """transformers' T5, whose decoder continues what its encoder has read, in seconds. Ours."""
    return _twin("t5")


@register("gptj-6b-hf-tiny")
def gptj_6b_hf_tiny() -> Run:
    """gptj-6b-hf shrunken to seconds: 2 layers of 64 on the embedded corpus. Ours."""
    return _twin("gptj")
