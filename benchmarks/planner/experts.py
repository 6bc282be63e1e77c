"""Published runs of newer chips and of mixtures of experts; `runs` reads them with the others.

NVIDIA's performance summaries (NeMo, Megatron-Bridge, AutoModel), AMD's (Primus) and four reports.
How the software worked is read in its recipes: routers are forced to balance, no token is dropped
where the table does not say it, experts are not cut (etp 1), the optimizer is distributed.
Left out: NVFP4, models with state-space layers, and Kimi K2, which trains with Muon.
"""

from __future__ import annotations

from dataclasses import replace

from records import Run, node

from aiscale.plan.layout import PROGRAMS, SHAPES, Layout, Shape, Software

#: Megatron-Core as NVIDIA tunes it for its summaries.
MEGATRON_TUNED = replace(
    PROGRAMS["megatron"], compiled=True, fused_loss=True, attention=3, tp_overlap="pipelined",
    gather_overlap=True, split="even", dispatch="by node",
)  # fmt: skip
AUTOMODEL = Software(
    compiled=True, fused_loss=True, attention=3, fused_optimizer=True, dispatch="by node",
    grouped=False, split="even",
)  # fmt: skip
#: Models that the planner does not name, of their config.json.
MORE_SHAPES = {
    "gpt3-20b": Shape(layers=44, hidden=6144, heads=48, vocab=51200, tied=True, seq=2048),
    "qwen2-57b-a14b": Shape(
        layers=28, hidden=3584, heads=28, kv_heads=4, ffn=18944, gated=True, vocab=151936, seq=4096,
        experts=64, top_k=8, expert_ffn=2560, shared_experts=8,
    ),
}  # fmt: skip
#: (GPUs that share NVLink, Gb/s of their network)
DOMAINS = {"gb200": (64, 64 * 400.0), "gb300": (64, 64 * 400.0)}
COLUMNS = ("tp", "pp", "ep", "micro_batch", "global_batch")
#: Releases whose recipes launch each expert's products by themselves.
BEFORE_GROUPED = ("25", "26.02", "26.04")


def _shape(row: dict, **more) -> Shape:
    shape = SHAPES.get(row["model"]) or MORE_SHAPES[row["model"]]
    return replace(shape, seq=row["seq"], **more)


def _platform(row: dict):
    devices, gbit = DOMAINS.get(row["gpu"], (8, 3200.0))
    return node(row["gpu"], gbit, devices)


def _layout(row: dict, **settings) -> Layout:
    pieces = row.get("virtual_stages") or 1
    columns = {name: row[name] for name in COLUMNS if name in row}
    cp = row.get("cp") or 1
    dp = row["gpus"] // (row["tp"] * row["pp"] * cp)
    schedule = "interleaved" if pieces > 1 and row["pp"] > 1 else "1f1b"
    pieces = pieces if row["pp"] > 1 else 1
    return Layout(dp=dp, cp=cp, virtual_stages=pieces, schedule=schedule, **columns, **settings)


def _step_s(row: dict, rate: float) -> float:
    return row["global_batch"] * row["seq"] / (rate * row["gpus"])


def _recipe(row: dict) -> Software:
    """What the recipes of a release did; `git show TAG:scripts/performance/configs` has them.

    Before 2026 a B200 sent tokens by NCCL's all-to-all, and on an H100 Qwen3 235B still does, while
    another micro-batch computes. Since 26.02 HybridEP orders tokens while it sends them. Since
    26.06 whole steps in MXFP8 are CUDA graphs, and experts share one kernel.
    """
    release = str(row["release"])
    software = replace(MEGATRON_TUNED, grouped=not release.startswith(BEFORE_GROUPED))
    if release.startswith("26"):
        software = replace(software, fused_order=True)
    if row["gpu"] == "b200-sxm" and release.startswith("25"):
        software = replace(software, dispatch="alltoall")
    if row["gpu"].startswith("h100") and row["model"].startswith("qwen3"):
        old = release.startswith(("25", "26.02"))
        if old or "235b" in row["model"]:
            software = replace(software, dispatch="alltoall", fused_order=False)
        if "235b" in row["model"]:
            software = replace(software, ep_overlap=True)
    if row.get("recipe") == "MXFP8" and not release.startswith(BEFORE_GROUPED):
        software = replace(software, graphed=True)
    return software


def nvidia(row: dict, index: int) -> Run:
    """Megatron-Core, as the recipe of its release has it."""
    software = _recipe(row)
    capacity = 1.0 if "tokendrop" in str(row["note"]) else 0.0
    layout = _layout(
        row,
        fsdp=bool(row["fsdp"]),
        zero_stage=0 if row["fsdp"] else 1,
        sequence_parallel=row["tp"] > 1,
        precision=row["precision"],
        software=software,
    )
    return Run(
        id=row["id"],
        shape=_shape(row, capacity=capacity) if capacity else _shape(row),
        layout=layout,
        platform=_platform(row),
        step_s=_step_s(row, row["measured_tokens_per_s_per_gpu"]),
        model=row["model"],
        memory_known=False,
    )


def automodel(row: dict, index: int) -> Run:
    """PyTorch's FSDP 2 with experts over ep ranks, Transformer Engine's kernels, DeepEP."""
    return Run(
        id=row["id"],
        shape=_shape(row),
        layout=_layout(row, fsdp=True, software=AUTOMODEL),
        platform=_platform(row),
        step_s=row["step_s"],
        model=row["model"],
        memory_known=False,
    )


def report(row: dict, index: int) -> Run:
    """Reports of single models. DeepSeek's DualPipe hides the exchange and most of the bubble."""
    shape = _shape(row)
    rate = row["tokens_per_s_per_gpu"]
    if rate is None:
        rate = row["mfu_pct"] / 100 * 989e12 / shape.flops_per_token()
    settings = {"software": replace(MEGATRON_TUNED, tp_overlap="backward", grouped=False)}
    if str(row["id"]).startswith("bridge"):
        software = replace(MEGATRON_TUNED, grouped=False, fused_order=True, ep_overlap=True)
        settings = {"software": replace(software, counter="torch")}
    if row["model"] == "deepseek-v3":
        overlapped = replace(MEGATRON_TUNED, ep_overlap=True, fp8_dispatch=True)
        settings = {"software": overlapped, "schedule": "zero-bubble"}
    if row["fsdp"]:
        settings = {"software": Software(compiled=True, attention=2, fused_optimizer=True)}
    layout = replace(
        _layout(row, recompute=row["recompute"], precision=row["precision"]),
        fsdp=bool(row["fsdp"]),
        zero_stage=0 if row["fsdp"] else 1,
        sequence_parallel=row["tp"] > 1,
        **settings,
    )
    return Run(
        id=row["id"],
        shape=shape,
        layout=layout,
        platform=_platform(row),
        step_s=_step_s(row, rate),
        memory_bytes=row["memory_GiB"] * 2**30 if row["memory_GiB"] else None,
        model=row["model"],
        first_stage=True,
        memory_known=False,
    )


def primus(row: dict, index: int) -> Run:
    """AMD's Primus: Megatron-LM and torchtitan on MI325X and MI355X."""
    layout = _layout(
        row,
        fsdp=bool(row["fsdp"]),
        zero_stage=0 if row["fsdp"] else 1,
        recompute=row["recompute"],
        precision=row["precision"],
        software=replace(MEGATRON_TUNED, attention=2, dispatch="alltoall"),
    )
    return Run(
        id=row["id"],
        shape=_shape(row),
        layout=layout,
        platform=_platform(row),
        step_s=_step_s(row, row["measured_tokens_per_s_per_gpu"]),
        model=row["model"],
        memory_known=False,
    )
