"""Recipes of what was trained on Frontier (OLCF, "AI for Science at Scale 2"): GPT-J, FORGE, 22B, 175B and 1T."""

from __future__ import annotations

from aiscale.config import LoopConfig, ModelConfig, OptimizerConfig, ParallelConfig, Run
from aiscale.recipes.registry import OPENWEBTEXT, OSCAR, register


@register("gptj-6b")
def gptj_6b() -> Run:
    """GPT-J 6B, OLCF's example of ZeRO on Frontier: 6,051,520,512 parameters here, 6,050,882,784 published.

    Wang and Komatsuzaki 2021, kingoflolz/mesh-transformer-jax, configs/6B_roto_256.json: batch 512 x 2048, 350,000
    steps. Attention and MLP read the same input. Ours differs: GPT-J has one norm a layer where we have two (2 D a
    layer), no biases in attention (4 D a layer) and one in its head (V); it turns 64 of a head's 256 channels, ours
    all. The seed trains on OSCAR.
    """
    return Run(
        name="gptj-6b",
        model=ModelConfig(
            n_layer=28,
            n_head=16,
            d_model=4096,
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


def _forge(name: str, shape: tuple[int, int, int], lr: float, decay: float, batch: int, micro_batch: int) -> Run:
    n_layer, n_head, d_model = shape
    return Run(
        name=name,
        model=ModelConfig(
            n_layer=n_layer,
            n_head=n_head,
            d_model=d_model,
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
    from 1.44B. The authors used LAMB at 0.008, which is no rate for AdamW: ours is GPT-3's for this size (Brown et al.
    2020, table 2.1). Their 257B tokens of papers are not public: the corpus is ours.
    """
    return _forge("forge-s", (24, 24, 2064), 2e-4, 0.01, 8192, 16)


@register("forge-m")
def forge_m() -> Run:
    """FORGE-M, printed as 13B: 40 layers of 5120; sources as for forge-s (forge-m.yml, tensor parallel 2)."""
    return _forge("forge-m", (40, 40, 5120), 1e-4, 0.1, 8064, 12)


@register("forge-l")
def forge_l() -> Run:
    """FORGE-L, printed as 25.6B: 48 layers of 6144; sources as for forge-s (forge-l.yml, tensor parallel 2).

    The printed shape makes 22.4B parameters, with any vocabulary near FORGE's; what the other 3.2B are, is not said.
    """
    return _forge("forge-l", (48, 48, 6144), 1e-4, 0.1, 8192, 16)


def _megatron(name: str, shape: tuple[int, int, int], batch: int, micro_batch: int) -> Run:
    n_layer, n_head, d_model = shape
    steps = 100_000 // batch
    return Run(
        name=name,
        model=ModelConfig(
            n_layer=n_layer,
            n_head=n_head,
            d_model=d_model,
            vocab_size=50257,
            max_seq_len=2048,
            activation_checkpointing=True,
        ),
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
    return _megatron("22b", (48, 96, 6144), 20, 2)


@register("175b")
def gpt_175b() -> Run:
    """The 175B model on Frontier, GPT-3's shape: 96 layers of 12288, tensor 8 x pipeline 12 in OLCF's script.

    Shape: Brown et al. 2020, table 2.1, and Dash et al. 2023 (arXiv:2312.12705). The rest from olcf/ai-training-series,
    launch_gpt175b_srun.frontier, a demonstration with batch 12; the paper is recalled to have used 640.
    """
    return _megatron("175b", (96, 96, 12288), 12, 1)


@register("1t")
def gpt_1t() -> Run:
    """The trillion-parameter model on Frontier: 128 layers of 25600, tensor 8 x pipeline 64 in OLCF's script.

    Shape: olcf/ai-training-series, launch_gpt1T_srun.frontier, as in Dash et al. 2023 (arXiv:2312.12705). The script
    is a demonstration with batch 8; the paper is recalled to have used 1600.
    """
    return _megatron("1t", (128, 128, 25600), 8, 1)
