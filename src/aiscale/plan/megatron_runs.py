"""Readers of the tables of Megatron-LM and its descendants: Megatron-DeepSpeed, GPT-NeoX, Megatron-Core."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from aiscale.machines import find_machine
from aiscale.plan.hardware import platform_of
from aiscale.plan.layout import Layout, Software
from aiscale.plan.runs import Run, gpt, node

MEGATRON_2021 = Software(
    flash=False,
    overlap=False,
    tp_overlap="none",
    fused_optimizer=True,
    peer_launches=False,
    fp32_gradients=False,
    counter="smi",
    split="even",
)
DEEPSPEED = replace(MEGATRON_2021, bucket_bytes=2e9)


def sc21(rows: list[dict]) -> Iterator[Run]:
    """Megatron-LM of 2021: attention with its score matrix, exchange after the backward pass."""
    for row in rows:
        v = row["virtual_stages_v"]
        yield Run(
            id=f"{row['params_B']}B",
            shape=gpt(row["layers"], row["hidden"], row["heads"], row["vocab"], row["seq"]),
            layout=Layout(
                dp=row["dp"], tp=row["tp"], pp=row["pp"], virtual_stages=v, schedule="interleaved" if v > 1 else "1f1b",
                micro_batch=row["micro_batch"], global_batch=row["global_batch"], recompute="full", precision="fp16",
                software=MEGATRON_2021,
            ),
            platform=node("a100-sxm4-80gb", 8, 1600.0),
            step_s=row["iter_time_s_derived"],
        )  # fmt: skip


def sc21_zero3(rows: list[dict]) -> Iterator[Run]:
    """The same beside DeepSpeed's ZeRO-3, which gathers tensor by tensor."""
    for row in rows:
        zero = row["scheme"] == "ZeRO-3"
        heads = {12288: 96, 20480: 128}[row["hidden"]]
        yield Run(
            id=f"{row['scheme']} {row['params_B']}B {row['gpus']}",
            shape=gpt(row["layers"], row["hidden"], heads, 51200, 2048),
            layout=Layout(
                dp=row["dp"], tp=row["tp"], pp=row["pp"], micro_batch=row["micro_batch"], recompute="full",
                global_batch=row["global_batch"], zero_stage=3 if zero else 0, precision="fp16",
                software=replace(MEGATRON_2021, per_tensor_gather=zero),
            ),
            platform=node("a100-sxm4-80gb", 8, 1600.0),
            step_s=row["iter_time_s_derived"],
            model=f"{row['params_B']} {row['gpus']}",
        )  # fmt: skip


def h100(rows: list[dict]) -> Iterator[Run]:
    """Megatron-Core of 2024: fused attention and kernels, overlap everywhere, distributed optimizer; the
    table leaves out micro-batches: assumed are 1 in a pipeline, else all sequences of a rank at once."""
    software = Software(
        compiled=True, attention=3, tp_overlap="pipelined", gather_overlap=True, peer_launches=False,
        fused_optimizer=True, split="even", counter="smi",
    )  # fmt: skip
    for row in rows:
        micro = row["global_batch"] // row["dp"] if row["pp"] == 1 else 1
        per = row["layers"] // row["pp"]
        v = max((k for k in range(1, per + 1) if per % k == 0 and per // k >= 2), default=1) if row["pp"] > 1 else 1
        m = row["global_batch"] // (row["dp"] * micro)
        yield Run(
            id=f"{row['params_B']}B",
            shape=gpt(row["layers"], row["hidden"], row["heads"], row["vocab"], row["seq"]),
            layout=Layout(
                dp=row["dp"], tp=row["tp"], pp=row["pp"], micro_batch=micro, global_batch=row["global_batch"],
                virtual_stages=v if m % row["pp"] == 0 else 1, schedule="interleaved" if v > 1 else "1f1b",
                zero_stage=1, sequence_parallel=row["tp"] > 1, software=software,
            ),
            platform=node("h100-sxm5-80gb", 8, 3200.0),
            step_s=row["iter_time_s_derived"],
        )  # fmt: skip


def bloom(rows: list[dict]) -> Iterator[Run]:
    """Megatron-DeepSpeed of 2022 on Jean Zay. Heads of 128 where the table leaves them out."""
    for row in rows:
        if row["layers"] is None:
            continue
        memory, seconds = row["mem_GB_max"], row["sec_per_it"]
        if "swapped" in str(row["note"]):
            seconds = row["tflops_per_gpu_hw"]
        if seconds is None and memory != "OOM":  # only a rate by an estimate of the FLOPs
            rate = row["tflops_per_gpu_hw"]
            seconds = 8 * 200e9 * 2048 * row["global_batch"] / (rate * 1e12 * row["gpus"])
        fp32 = "fp32 gradient" in str(row["note"])
        software = replace(DEEPSPEED, fp32_gradients=fp32, split="auto" if fp32 else "even")
        yield Run(
            id=f"line {row['line']}",
            shape=gpt(row["layers"], row["hidden"], row["heads"] or _heads(row["hidden"]), row["vocab"], row["seq"]),
            layout=Layout(
                dp=row["gpus"] // (row["tp"] * row["pp"]), tp=row["tp"], pp=row["pp"], micro_batch=row["micro_batch"],
                global_batch=row["global_batch"], zero_stage=1, recompute="full", software=software,
            ),
            platform=node("a100-sxm4-80gb", 8, 400.0),
            step_s=seconds,
            memory_bytes=memory * 1e9 if isinstance(memory, (int, float)) else None,
            ran=memory != "OOM",
            model=f"{row['hidden']} x {row['layers']}, batch {row['global_batch']}",
        )  # fmt: skip


def _heads(hidden: int) -> int:
    """Heads of about 128 channels."""
    return min((n for n in range(1, hidden + 1) if hidden % n == 0), key=lambda n: abs(hidden / n - 128))


def forge(rows: list[dict]) -> Iterator[Run]:
    """GPT-NeoX of 2022 on Frontier, without fused attention. The row without its micro-batches is left out."""
    software = replace(MEGATRON_2021, fused_kernels=False)
    for row in rows:
        if row["grad_accum"] is None:
            continue
        tp, gpus = row["model_parallel"], row["gcds"]
        batch = gpus // tp * row["micro_batch"] * row["grad_accum"]
        yield Run(
            id=f"{row['model']} {gpus}",
            shape=replace(gpt(row["layers"], row["hidden"], row["heads"], 52000, row["seq"]), tied=False),
            layout=Layout(
                dp=gpus // tp, tp=tp, micro_batch=row["micro_batch"], global_batch=batch, zero_stage=1,
                recompute="full", software=software,
            ),
            platform=node("mi250x-gcd", 8, 800.0),
            step_s=batch * row["seq"] / (row["tokens_per_s_per_gcd_implied"] * gpus),
        )  # fmt: skip


def bigscience(rows: list[dict]) -> Iterator[Run]:
    """Megatron-DeepSpeed of 2021 on V100s."""
    for index, row in enumerate(rows):
        yield Run(
            id=f"row {index}",
            shape=gpt(row["layers"], row["hidden"], row["heads"], row["vocab"], row["seq"]),
            layout=Layout(
                dp=row["dp"], tp=row["tp"], pp=row["pp"], micro_batch=row["micro_batch"], zero_stage=1,
                global_batch=row["global_batch"], recompute=row["recompute"], precision="fp16", software=DEEPSPEED,
            ),
            platform=node("v100-sxm2-32gb", 4, 400.0),
            step_s=row["sec_per_it"],
            memory_bytes=row["mem_GB"] * 1e9,
            model="1.3B",
        )  # fmt: skip


def korthikanti(rows: list[dict]) -> Iterator[Run]:
    """Each row twice: full recomputation, and sequence parallelism with selective recomputation."""
    for row in rows:
        for full in (True, False):
            v = row["interleave_v"]
            yield Run(
                id=f"{row['model']} {'full' if full else 'selective'}",
                shape=gpt(row["layers"], row["hidden"], row["heads"], row["vocab"], row["seq"]),
                layout=Layout(
                    tp=row["tp"], pp=row["pp"], virtual_stages=v, schedule="interleaved" if v > 1 else "1f1b",
                    micro_batch=row["micro_batch"], global_batch=row["global_batch"], precision="fp16",
                    recompute="full" if full else "selective", sequence_parallel=not full,
                    software=replace(MEGATRON_2021, tp_overlap="backward"),
                ),
                platform=node("a100-sxm4-80gb", 8, 1600.0),
                step_s=row["iter_time_full_recompute_s" if full else "iter_time_seqpar_selective_s"],
            )  # fmt: skip


def radius(rows: list[dict]) -> Iterator[Run]:
    """Megatron-LM on Perlmutter, gradients in fp32 after the backward pass; days over 300,000 iterations."""
    software = replace(MEGATRON_2021, fp32_gradients=True, tp_overlap="backward")
    for row in rows:
        if row["wall_clock_days"] is None:
            continue
        yield Run(
            id=f"density {row['density_d']} period {row['update_T']}",
            shape=gpt(row["layers"], row["hidden"], row["heads"], 50304, row["seq"]),
            layout=Layout(
                dp=row["dp"], micro_batch=row["micro_batch"], global_batch=row["global_batch"], recompute="full",
                density=row["density_d"] or 1.0, period=row["update_T"] or 1, software=software,
            ),
            platform=platform_of(find_machine("perlmutter-80gb")),
            step_s=row["s_per_iter_if_300k"],
        )  # fmt: skip
