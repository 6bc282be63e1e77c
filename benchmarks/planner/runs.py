"""Published runs as the planner's input: each table's rows, and how their software worked.

    for run in runs("internevo_7b"):
        run.shape, run.layout, run.platform, run.step_s, run.memory_bytes, run.ran
    SOURCES                               # names of the tables, each with the reader of a row

Tables that only the planner reads lie in `tables/`, the others in the package
(`aiscale.plan.published`). How software worked (fused attention, overlap, recomputation) is read in
its source, not fitted. Rows whose model or layout the source leaves out are skipped, and so are
rows that the table's note rejects. Left out as a whole: AxoNN's and Dash et al.'s runs, whose
layouts are recalled, and MaxText's, whose tables leave out batch and layout. Newer chips and
mixtures of experts are read in `experts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import experts
from records import Run, node

from aiscale.plan import published
from aiscale.plan.hardware import Platform, platform_of
from aiscale.plan.layout import PROGRAMS, SHAPES, Layout, Shape, Software
from aiscale.plan.machines import find_machine

TABLES = Path(__file__).parent / "tables"
#: of a layout, named alike in the tables
COLUMNS = ("dp", "tp", "pp", "cp", "micro_batch", "global_batch")
MEGATRON_2021 = Software(
    flash=False, overlap=False, tp_overlap="none", fused_optimizer=True, fp32_gradients=False,
    loss_in_place=True, counter="smi", split="even", traffic=0.8,
)  # fmt: skip
DEEPSPEED = replace(MEGATRON_2021, bucket_bytes=2e9)


@lru_cache(maxsize=4)
def without_peer_access(name: str) -> Platform:
    """The machine under `srun --gpus-per-task=1`, as README.md of mz687/radius starts its jobs.
    A rank sees one device and cannot open another's memory (E3SM-Project/E3SM#4834). Inferred: data
    inside the node crosses the host's memory and PCIe 4.0 x16, 32 GB/s by its standard."""
    machine = find_machine(name)
    links = {
        "ring_gb_s": 32.0,
        "bus_gb_s": None,
        "pair_gb_s": None,
        "mate_gb_s": None,
        "in_switch_gb_s": None,
    }
    return platform_of(replace(machine, node=replace(machine.node, **links)))


def _layout(row: dict, **settings) -> Layout:
    """The row's columns and these settings; several pieces a rank are interleaved."""
    columns = {name: row[name] for name in COLUMNS if name in row}
    schedule = "interleaved" if settings.get("virtual_stages", 1) > 1 else "1f1b"
    return Layout(**{"schedule": schedule} | columns | settings)


def _shape(row: dict, **settings) -> Shape:
    columns = {
        name: row[name] for name in ("layers", "hidden", "heads", "vocab", "seq") if name in row
    }
    return Shape(**{"tied": True} | columns | settings)


# Megatron-LM and its descendants -----------------------------------------------------------------


def _sc21(row: dict, index: int) -> Run:
    """Megatron-LM of 2021: attention with its score matrix, exchange after the backward pass."""
    settings = {"virtual_stages": row["virtual_stages_v"], "recompute": "full", "precision": "fp16"}
    return Run(
        id=f"{row['params_B']}B",
        shape=_shape(row),
        layout=_layout(row, software=MEGATRON_2021, **settings),
        platform=node("a100-sxm4-80gb", 1600.0),
        step_s=row["iter_time_s_derived"],
    )


def _sc21_zero3(row: dict, index: int) -> Run:
    """The same beside DeepSpeed's ZeRO-3, which gathers tensor by tensor."""
    zero = row["scheme"] == "ZeRO-3"
    settings = {"recompute": "full", "zero_stage": 3 if zero else 0, "precision": "fp16"}
    return Run(
        id=f"{row['scheme']} {row['params_B']}B {row['gpus']}",
        shape=_shape(row, heads={12288: 96, 20480: 128}[row["hidden"]], vocab=51200, seq=2048),
        layout=_layout(row, software=replace(MEGATRON_2021, per_tensor_gather=zero), **settings),
        platform=node("a100-sxm4-80gb", 1600.0),
        step_s=row["iter_time_s_derived"],
        model=f"{row['params_B']} {row['gpus']}",
    )


def _h100(row: dict, index: int) -> Run:
    """Megatron-Core of 2024: fused attention and kernels, overlap, distributed optimizer.
    The table leaves out micro-batches: assumed are 1 in a pipeline, else all sequences of a rank at
    once."""
    software = Software(
        compiled=True, fused_loss=True, attention=3, tp_overlap="pipelined", gather_overlap=True,
        fused_optimizer=True, fused_gradients=True, split="even", counter="smi",
    )  # fmt: skip
    micro = row["global_batch"] // row["dp"] if row["pp"] == 1 else 1
    per = row["layers"] // row["pp"]
    v = (
        max((k for k in range(1, per + 1) if per % k == 0 and per // k >= 2), default=1)
        if row["pp"] > 1
        else 1
    )
    fits = row["global_batch"] // (row["dp"] * micro) % row["pp"] == 0
    schedule = "interleaved" if v > 1 else "1f1b"
    settings = {"virtual_stages": v if fits else 1, "schedule": schedule, "micro_batch": micro}
    return Run(
        id=f"{row['params_B']}B",
        shape=_shape(row),
        layout=_layout(
            row, zero_stage=1, sequence_parallel=row["tp"] > 1, software=software, **settings
        ),
        platform=node("h100-sxm5-80gb", 3200.0),
        step_s=row["iter_time_s_derived"],
    )


def _bloom(row: dict, index: int) -> Run | None:
    """Megatron-DeepSpeed of 2022 on Jean Zay. Heads of about 128 where the table lacks them."""
    if row["layers"] is None:
        return None
    memory, seconds, hidden = row["mem_GB_max"], row["sec_per_it"], row["hidden"]
    if "swapped" in str(row["note"]):
        seconds = row["tflops_per_gpu_hw"]
    if seconds is None and memory != "OOM":  # only a rate by an estimate of the FLOPs
        seconds = (
            8 * 200e9 * 2048 * row["global_batch"] / (row["tflops_per_gpu_hw"] * 1e12 * row["gpus"])
        )
    fp32 = "fp32 gradient" in str(row["note"])
    software = replace(DEEPSPEED, fp32_gradients=fp32, split="auto" if fp32 else "even")
    divisors = (n for n in range(row["tp"], hidden + 1, row["tp"]) if hidden % n == 0)
    heads = row["heads"] or min(divisors, key=lambda n: abs(hidden / n - 128))
    dp = row["gpus"] // (row["tp"] * row["pp"])
    return Run(
        id=f"line {row['line']}",
        shape=_shape(row, heads=heads),
        layout=_layout(row, dp=dp, zero_stage=1, recompute="full", software=software),
        platform=node("a100-sxm4-80gb", 400.0),
        step_s=seconds,
        memory_bytes=memory * 1e9 if isinstance(memory, (int, float)) else None,
        ran=memory != "OOM",
        model=f"{hidden} x {row['layers']}, batch {row['global_batch']}",
    )


def _forge(row: dict, index: int) -> Run | None:
    """GPT-NeoX of 2022 on Frontier, without fused attention, nor a row without micro-batches."""
    if row["grad_accum"] is None:
        return None
    tp, gpus = row["model_parallel"], row["gcds"]
    batch = gpus // tp * row["micro_batch"] * row["grad_accum"]
    settings = {
        "dp": gpus // tp,
        "tp": tp,
        "global_batch": batch,
        "zero_stage": 1,
        "recompute": "full",
    }
    return Run(
        id=f"{row['model']} {gpus}",
        shape=_shape(row, vocab=52000, tied=False),
        layout=_layout(row, software=replace(MEGATRON_2021, fused_kernels=False), **settings),
        platform=node("mi250x-gcd", 800.0),
        step_s=batch * row["seq"] / (row["tokens_per_s_per_gcd_implied"] * gpus),
    )


def _bigscience(row: dict, index: int) -> Run:
    """Megatron-DeepSpeed of 2021 on V100s."""
    settings = {"zero_stage": 1, "recompute": row["recompute"], "precision": "fp16"}
    return Run(
        id=f"row {index}",
        shape=_shape(row),
        layout=_layout(row, software=DEEPSPEED, **settings),
        platform=node("v100-sxm2-32gb", 400.0, 4),
        step_s=row["sec_per_it"],
        memory_bytes=row["mem_GB"] * 1e9,
        model="1.3B",
    )


def _korthikanti(row: dict, index: int) -> list[Run]:
    """Each row twice: full recomputation, and sequence parallelism with selective recomputation."""
    settings = {"virtual_stages": row["interleave_v"], "precision": "fp16"}
    software = replace(MEGATRON_2021, tp_overlap="backward")
    return [
        Run(
            id=f"{row['model']} {recompute}",
            shape=_shape(row),
            layout=_layout(
                row, recompute=recompute, sequence_parallel=parallel, software=software, **settings
            ),
            platform=node("a100-sxm4-80gb", 1600.0),
            step_s=row[column],
        )
        for recompute, parallel, column in (
            ("full", False, "iter_time_full_recompute_s"),
            ("selective", True, "iter_time_seqpar_selective_s"),
        )
    ]


def _radius(row: dict, index: int) -> Run | None:
    """Megatron-LM on Perlmutter, fp32 gradients after the backward pass; days are 300,000 steps."""
    if row["wall_clock_days"] is None:
        return None
    dense = 60_000 / 300_000  # of the iterations, before Radius begins
    settings = {
        "density": dense + (1 - dense) * (row["density_d"] or 1.0),
        "period": row["update_T"] or 1,
        "recompute": "full",
    }
    software = replace(MEGATRON_2021, fp32_gradients=True, tp_overlap="backward")
    return Run(
        id=f"density {row['density_d']} period {row['update_T']}",
        shape=_shape(row, vocab=50304),
        layout=_layout(row, software=software, **settings),
        platform=without_peer_access("perlmutter-80gb"),
        step_s=row["s_per_iter_if_300k"],
    )


def _vtrain(row: dict, index: int) -> Run:
    """A Megatron-like program on one DGX A100: small models, so mostly the host sets the pace."""
    return Run(
        id=row["id"],
        shape=_shape(row, tied=row["pp"] == 1),
        layout=_layout(row, software=MEGATRON_2021, recompute="full", precision="fp16"),
        platform=node("a100-sxm4-80gb", 800.0),
        step_s=row["global_batch"]
        * row["seq"]
        / (row["measured_tokens_per_s_per_gpu"] * row["gpus"]),
        model=f"{row['layers']} layers, {row['gpus']} GPUs, batch {row['global_batch']}",
    )


# Other programs ----------------------------------------------------------------------------------


def _nanotron(row: dict, index: int) -> Run:
    """Eager, asynchronous tensor parallelism, split by cost; the first stage's memory by torch."""
    gpus = row["gpus"]
    speed = row["measured_tokens_per_s_per_gpu"]
    memory = row["measured_memory_GB"]
    tied = row["tied"] == "True" and row["pp"] == 1
    settings = {"zero_stage": row["zero_stage"], "sequence_parallel": True}
    return Run(
        id=row["id"],
        shape=_shape(row, heads=32, ffn=row["ffn"], gated=True, tied=tied),
        layout=_layout(row, software=replace(PROGRAMS["nanotron"], split="cost"), **settings),
        platform=node("h100-sxm5-80gb", 3200.0),
        step_s=row["global_batch"] * row["seq"] / (speed * gpus) if speed else None,
        memory_bytes=memory * 1e9 if memory else None,
        ran=row["ran"] == "True",
        model=f"{row['layers']} layers, {gpus} GPUs",
        first_stage=True,
    )


def _internevo(row: dict, index: int) -> Run:
    """Fused attention; states over all ranks or inside a node, one broadcast an owner back."""
    words = row["note"].split()
    shards = 0 if "all" in words else int(words[words.index("ranks") - 1])
    software = Software(
        shard_ranks=shards,
        broadcasts=True,
        fp32_gradients=False,
        tp_overlap="none",
        fused_optimizer=True,
    )
    return Run(
        id=row["id"],
        shape=_shape(row, ffn=11008, gated=True, tied=False),
        layout=_layout(row, zero_stage=1, recompute=row["recompute"], software=software),
        platform=node("a100-sxm4-80gb", 400.0),
        step_s=row["global_batch"]
        * row["seq"]
        / (row["measured_tokens_per_s_per_gpu"] * row["gpus"]),
        model=f"{row['gpus']} GPUs, batch {row['global_batch']}",
    )


def _torchtitan(row: dict, index: int) -> Run | None:
    """FSDP 2, each block under torch.compile unless the table denies it; since 2025 the loss, too.
    Memory is what is reserved; H100s have 500 W, 96 GB and 2.4 TB/s; a pipeline has as many
    micro-batches as pieces, the default of the time. Float8 by row is left out."""
    words, pp = row["techniques"], row["pp"]
    if "rowwise" in words:
        return None
    machine = node("h200-sxm-141gb" if "H200" in row["hardware"] else "h100-sxm5-80gb", 3200.0)
    if "H200" not in row["hardware"]:
        machine = replace(machine, memory_bytes=102e9, memory_bytes_s=2.4e12)
        # between H100's two boards: 454 TFLOP/s of products at 350 W, 794 at 700 W
        power = (500 / 700) ** 0.81
        machine = replace(
            machine, best_product=machine.best_product * power, attention=machine.attention * power
        )
    compiled = words != "FSDP" and "vanilla" not in words
    software = Software(
        compiled=compiled, fused_loss=compiled and "2025" in row["source"],
        tp_overlap="pipelined" if "async" in words else "none",
        split="even", regather=pp == 1, fused_optimizer=True, counter="reserved",
    )  # fmt: skip
    v = 2 if "interleaved" in words else 1
    settings = {
        "dp": row["fsdp"],
        "fsdp": True,
        "recompute": "selective" if "selective" in row["act_ckpt"] else "full",
        "virtual_stages": v,
        "micro_batch": max(1, row["local_batch"] // (pp * v if pp > 1 else 1)),
        "sequence_parallel": row["tp"] > 1,
        "precision": "fp8" if "float8" in words else "bf16",
    }
    return Run(
        id=f"{row['model']} row {index}",
        shape=replace(SHAPES[f"llama-{row['model'].split()[-1].lower()}"], seq=row["seq"]),
        layout=_layout(row, software=software, **settings),
        platform=machine,
        step_s=row["seq"] * row["global_batch"] / (row["tokens_per_s_per_gpu"] * row["gpus"]),
        memory_bytes=row["peak_mem_GiB"] * 2**30 if row["peak_mem_GiB"] else None,
    )


def _foundry(row: dict, index: int) -> Run:
    """Composer's FSDP, eager, with a fused loss (`loss_fn` of its ComposerMPTCausalLM).
    Gradients travel in fp32 except in mode PURE. Triton's attention, but for four of the
    large-scale models: its scripts/train/benchmarking at b2a43a147 and 5e85bd62d."""
    pure, whole = row["mp_mode"] == "PURE", row["sharding"] == "FULL_SHARD"
    attention = 2 if "Large" in row["section"] and row["model"] not in ("MPT-13b", "MPT-30b") else 1
    software = Software(
        fused_loss=True,
        fp32_gradients=not pure,
        regather=whole,
        fused_optimizer=True,
        attention=attention,
        traffic=0.55,
    )
    settings = {
        "dp": row["gpus"],
        "fsdp": True,
        "recompute": "full" if row["act_ckpt"] == "True" else "none",
    }
    settings |= {"precision": "fp8" if row["precision"] == "amp_fp8" else "bf16"}
    return Run(
        id=f"{row['model']} {row['gpu']} {row['gpus']} seq {row['seq']}",
        shape=_shape(row, hidden=row["d_model"]),
        layout=_layout(row, software=software, **settings),
        platform=node(row["gpu"], 1600.0 if row["gpu"].startswith("a100") else 3200.0),
        step_s=row["step_time_s_derived"],
    )


def _nanogpt(row: dict, index: int) -> Run | None:
    """nanoGPT compiled, its single GPU before fused attention; llm.c in CUDA.
    The micro-batch is there where the note states it. Left out: the row that the note rejects, and
    the one on characters, whose vocabulary is 65."""
    note, nano = row["note"], row["code"].startswith("nano")
    if "REJECT" in note or "char" in row["code"]:
        return None
    words = note.replace(",", " ").replace(";", " ").split()
    micro = int(words[words.index("b") + 1]) if words[0] == "b" else 12
    settings = {
        "dp": row["gpus"],
        "micro_batch": micro,
        "global_batch": row["tokens_per_step"] // row["seq"],
    }
    software = Software(
        compiled=True,
        fused_loss=True,
        flash=row["gpus"] > 1,
        attention=2 if nano else 3,
        fp32_gradients=nano,
        fused_optimizer=True,
    )
    return Run(
        id=f"{row['code']} {row['gpus']}",
        shape=_shape(
            row, heads={768: 12, 1024: 16, 1280: 20, 1600: 25}[row["hidden"]], vocab=50304
        ),
        layout=_layout(row, zero_stage=row["zero_stage"], software=software, **settings),
        platform=node(
            "h100-sxm5-80gb" if "H100" in row["gpu"] else f"a100-sxm4-{'40' if nano else '80'}gb",
            1600.0,
        ),
        step_s=row["iter_time_s"],
    )


SOURCES: dict[str, Callable[[dict, int], Run | list[Run] | None]] = {
    "nanotron_sweep": _nanotron,
    "internevo_7b": _internevo,
    "megatron_sc21_table1": _sc21,
    "megatron_sc21_table2_zero3": _sc21_zero3,
    "megatron_core_h100_weak_scaling": _h100,
    "bloom_176b_topology_sweep": _bloom,
    "forge_frontier_throughput": _forge,
    "torchtitan_llama3": _torchtitan,
    "llm_foundry_mpt_fsdp": _foundry,
    "bigscience_1b3_v100_sweep": _bigscience,
    "korthikanti_table5": _korthikanti,
    "nanogpt_llmc": _nanogpt,
    "radius_perlmutter": _radius,
    "vtrain_dgx_a100": _vtrain,
    "megatron_bridge": experts.nvidia,
    "nemo_2025": experts.nvidia,
    "automodel_moe": experts.automodel,
    "moe_reports": experts.report,
    "primus_mi300": experts.primus,
}
#: Megatron-LM and its descendants: one program. Every other source is the only one of its program.
MEGATRON = (
    "megatron_sc21_table1",
    "megatron_sc21_table2_zero3",
    "megatron_core_h100_weak_scaling",
    "korthikanti_table5",
    "radius_perlmutter",
    "vtrain_dgx_a100",
    "bloom_176b_topology_sweep",
    "bigscience_1b3_v100_sweep",
    "forge_frontier_throughput",
    "megatron_bridge",
    "nemo_2025",
    "moe_reports",
    "primus_mi300",
)


@lru_cache(maxsize=32)
def runs(source: str) -> tuple[Run, ...]:
    """The runs of one published table."""
    folder = {"folder": TABLES} if any(TABLES.glob(f"{source}.csv*")) else {}
    rows = published.verified(published.table(source, **folder))
    read = [SOURCES[source](row, index) for index, row in enumerate(rows)]
    return tuple(
        run for each in read if each for run in (each if isinstance(each, list) else [each])
    )
