"""Published runs as the planner's input: each table's rows with what is known of the software that ran them.

    for run in runs("internevo_7b"): run.shape, run.layout, run.platform, run.step_s, run.memory_bytes, run.ran
    SOURCES                               # names of the tables, each with the reader of its rows

What a reader says of the software (fused attention, overlap, recomputation) is the software's, not fitted. Rows whose
model or layout the source leaves out are skipped, and so are rows that the table's note rejects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from aiscale import published
from aiscale.machines import find_machine
from aiscale.plan.hardware import Platform, platform, platform_of
from aiscale.plan.layout import Layout, Software
from aiscale.plan.shapes import Shape

GIB = 2.0**30


@dataclass(frozen=True, kw_only=True)
class Run:
    """One published run, and what was measured."""

    id: str
    shape: Shape
    layout: Layout
    platform: Platform
    step_s: float | None = None
    memory_bytes: float | None = None
    ran: bool = True
    model: str = ""  #: layouts of one model are ranked among each other
    first_stage: bool = False  #: memory is that of the first stage, not of the fullest


@lru_cache(maxsize=64)
def _node(name: str, devices: int, gbit: float) -> Platform:
    return platform(name, gpus_per_node=devices, node_gbit_s=gbit)


def _nanotron(rows: list[dict]) -> Iterator[Run]:
    """Eager, asynchronous tensor parallelism, split by cost; memory of the first stage by torch's counters."""
    software = Software(split="cost")
    for row in rows:
        gpus, speed, memory = row["gpus"], row["measured_tokens_per_s_per_gpu"], row["measured_memory_GB"]
        yield Run(
            id=row["id"],
            shape=_llama(
                row["layers"], row["hidden"], 32, 32, row["ffn"], row["vocab"],
                row["tied"] == "True" and row["pp"] == 1, row["seq"],
            ),
            layout=Layout(
                dp=row["dp"], tp=row["tp"], pp=row["pp"], micro_batch=row["micro_batch"],
                global_batch=row["global_batch"], zero_stage=row["zero_stage"], sequence_parallel=True,
                software=software,
            ),
            platform=_node("h100-sxm5-80gb", 8, 3200.0),
            step_s=row["global_batch"] * row["seq"] / (speed * gpus) if speed else None,
            memory_bytes=memory * 1e9 if memory else None,
            ran=row["ran"] == "True",
            model=f"{row['layers']} layers, {gpus} GPUs",
            first_stage=True,
        )  # fmt: skip


def _llama(layers, hidden, heads, keys, ffn, vocab, tied, seq) -> Shape:
    return Shape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=keys, ffn=ffn, gated=True, vocab=vocab, tied=tied, seq=seq
    )


def _gpt(layers, hidden, heads, vocab, seq) -> Shape:
    return Shape(layers=layers, hidden=hidden, heads=heads, vocab=vocab, tied=True, seq=seq)


def _internevo(rows: list[dict]) -> Iterator[Run]:
    """Fused attention; states over all ranks or inside a node, returned by one broadcast an owner."""
    for row in rows:
        words = row["note"].split()
        shards = 0 if "all" in words else int(words[words.index("ranks") - 1])
        software = Software(
            shard_ranks=shards, broadcasts=True, fp32_gradients=False, tp_overlap="none", fused_optimizer=True
        )
        yield Run(
            id=row["id"],
            shape=_llama(32, 4096, 32, 32, 11008, row["vocab"], False, row["seq"]),
            layout=Layout(
                dp=row["dp"], tp=row["tp"], micro_batch=row["micro_batch"], global_batch=row["global_batch"],
                zero_stage=1, recompute=row["recompute"], software=software,
            ),
            platform=_node("a100-sxm4-80gb", 8, 400.0),
            step_s=row["global_batch"] * row["seq"] / (row["measured_tokens_per_s_per_gpu"] * row["gpus"]),
            model=f"{row['gpus']} GPUs, batch {row['global_batch']}",
        )  # fmt: skip


_MEGATRON_2021 = Software(
    flash=False,
    overlap=False,
    tp_overlap="none",
    fused_optimizer=True,
    peer_launches=False,
    fp32_gradients=False,
    counter="smi",
    split="even",
)


def _sc21(rows: list[dict]) -> Iterator[Run]:
    """Megatron-LM of 2021: attention with its score matrix, exchange after the backward pass."""
    for row in rows:
        v = row["virtual_stages_v"]
        yield Run(
            id=f"{row['params_B']}B",
            shape=_gpt(row["layers"], row["hidden"], row["heads"], row["vocab"], row["seq"]),
            layout=Layout(
                dp=row["dp"], tp=row["tp"], pp=row["pp"], virtual_stages=v, schedule="interleaved" if v > 1 else "1f1b",
                micro_batch=row["micro_batch"], global_batch=row["global_batch"], recompute="full", precision="fp16",
                software=_MEGATRON_2021,
            ),
            platform=_node("a100-sxm4-80gb", 8, 1600.0),
            step_s=row["iter_time_s_derived"],
        )  # fmt: skip


def _sc21_zero3(rows: list[dict]) -> Iterator[Run]:
    """The same beside DeepSpeed's ZeRO-3, which gathers tensor by tensor."""
    for row in rows:
        zero = row["scheme"] == "ZeRO-3"
        heads = {12288: 96, 20480: 128}[row["hidden"]]
        yield Run(
            id=f"{row['scheme']} {row['params_B']}B {row['gpus']}",
            shape=_gpt(row["layers"], row["hidden"], heads, 51200, 2048),
            layout=Layout(
                dp=row["dp"], tp=row["tp"], pp=row["pp"], micro_batch=row["micro_batch"], recompute="full",
                global_batch=row["global_batch"], zero_stage=3 if zero else 0, precision="fp16",
                software=replace(_MEGATRON_2021, per_tensor_gather=zero),
            ),
            platform=_node("a100-sxm4-80gb", 8, 1600.0),
            step_s=row["iter_time_s_derived"],
            model=f"{row['params_B']} {row['gpus']}",
        )  # fmt: skip


def _h100(rows: list[dict]) -> Iterator[Run]:
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
            shape=_gpt(row["layers"], row["hidden"], row["heads"], row["vocab"], row["seq"]),
            layout=Layout(
                dp=row["dp"], tp=row["tp"], pp=row["pp"], micro_batch=micro, global_batch=row["global_batch"],
                virtual_stages=v if m % row["pp"] == 0 else 1, schedule="interleaved" if v > 1 else "1f1b",
                zero_stage=1, sequence_parallel=row["tp"] > 1, software=software,
            ),
            platform=_node("h100-sxm5-80gb", 8, 3200.0),
            step_s=row["iter_time_s_derived"],
        )  # fmt: skip


def _bloom(rows: list[dict]) -> Iterator[Run]:
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
        software = replace(_MEGATRON_2021, fp32_gradients=fp32, split="auto" if fp32 else "even")
        yield Run(
            id=f"line {row['line']}",
            shape=_gpt(row["layers"], row["hidden"], row["heads"] or _heads(row["hidden"]), row["vocab"], row["seq"]),
            layout=Layout(
                dp=row["gpus"] // (row["tp"] * row["pp"]), tp=row["tp"], pp=row["pp"], micro_batch=row["micro_batch"],
                global_batch=row["global_batch"], zero_stage=1, recompute="full", software=software,
            ),
            platform=_node("a100-sxm4-80gb", 8, 400.0),
            step_s=seconds,
            memory_bytes=memory * 1e9 if isinstance(memory, (int, float)) else None,
            ran=memory != "OOM",
            model=f"{row['hidden']} x {row['layers']}, batch {row['global_batch']}",
        )  # fmt: skip


def _heads(hidden: int) -> int:
    """Heads of about 128 channels."""
    return min((n for n in range(1, hidden + 1) if hidden % n == 0), key=lambda n: abs(hidden / n - 128))


def _forge(rows: list[dict]) -> Iterator[Run]:
    """GPT-NeoX of 2022 on Frontier, without fused attention. The row without its micro-batches is left out."""
    software = Software(
        flash=False,
        fused_kernels=False,
        overlap=False,
        tp_overlap="none",
        fused_optimizer=True,
        peer_launches=False,
        fp32_gradients=False,
        counter="smi",
        split="even",
    )
    for row in rows:
        if row["grad_accum"] is None:
            continue
        tp, gpus = row["model_parallel"], row["gcds"]
        batch = gpus // tp * row["micro_batch"] * row["grad_accum"]
        yield Run(
            id=f"{row['model']} {gpus}",
            shape=replace(_gpt(row["layers"], row["hidden"], row["heads"], 52000, row["seq"]), tied=False),
            layout=Layout(
                dp=gpus // tp, tp=tp, micro_batch=row["micro_batch"], global_batch=batch, zero_stage=1,
                recompute="full", software=software,
            ),
            platform=_node("mi250x-gcd", 8, 800.0),
            step_s=batch * row["seq"] / (row["tokens_per_s_per_gcd_implied"] * gpus),
        )  # fmt: skip


_LLAMA = {
    "8B": (32, 4096, 32, 8, 14336, 128256),
    "70B": (80, 8192, 64, 8, 28672, 128256),
    "405B": (126, 16384, 128, 8, 53248, 128256),
}


def _torchtitan(rows: list[dict]) -> Iterator[Run]:
    """FSDP 2 with torch.compile except where the table says otherwise; H100s of 500 W and 2.4 TB/s; in a
    pipeline as many micro-batches as pieces, the default of the time. Float8 by row, a trial, is left out."""
    capped = replace(_node("h100-sxm5-80gb", 8, 3200.0), memory_bytes=96e9, memory_bytes_s=2.4e12)
    capped = replace(capped, best_product=capped.best_product * (500 / 700) ** 0.4)
    for index, row in enumerate(rows):
        words = row["techniques"]
        if "rowwise" in words:
            continue
        layers, hidden, heads, keys, ffn, vocab = _LLAMA[row["model"].split()[-1]]
        pp, interleaved = row["pp"], "interleaved" in words
        compiled = words != "FSDP" and "vanilla" not in words
        software = Software(
            compiled=compiled,
            tp_overlap="pipelined" if "async" in words else "none",
            split="even",
            regather=pp == 1,
            fused_optimizer=True,
        )
        recompute = "selective" if "selective" in row["act_ckpt"] else "full"
        pieces = pp * (2 if interleaved else 1) if pp > 1 else 1
        h200 = "H200" in row["hardware"]
        yield Run(
            id=f"{row['model']} row {index}",
            shape=_llama(layers, hidden, heads, keys, ffn, vocab, False, row["seq"]),
            layout=Layout(
                dp=row["fsdp"], tp=row["tp"], pp=pp, cp=row["cp"], fsdp=True, recompute=recompute,
                virtual_stages=2 if interleaved else 1, schedule="interleaved" if interleaved else "1f1b",
                micro_batch=max(1, row["local_batch"] // pieces), global_batch=row["global_batch"],
                sequence_parallel=row["tp"] > 1, precision="fp8" if "float8" in words else "bf16",
                software=software,
            ),
            platform=_node("h200-sxm-141gb", 8, 3200.0) if h200 else capped,
            step_s=row["seq"] * row["global_batch"] / (row["tokens_per_s_per_gpu"] * row["gpus"]),
            memory_bytes=row["peak_mem_GiB"] * GIB if row["peak_mem_GiB"] else None,
        )  # fmt: skip


def _foundry(rows: list[dict]) -> Iterator[Run]:
    """Composer's FSDP, eager, fused attention; gradients travel in fp32 except in mode PURE."""
    for row in rows:
        a100 = row["gpu"].startswith("a100")
        software = Software(
            fp32_gradients=row["mp_mode"] != "PURE", regather=row["sharding"] == "FULL_SHARD", fused_optimizer=True
        )
        yield Run(
            id=f"{row['model']} {row['gpu']} {row['gpus']} seq {row['seq']}",
            shape=_gpt(row["layers"], row["d_model"], row["heads"], row["vocab"], row["seq"]),
            layout=Layout(
                dp=row["gpus"], micro_batch=row["micro_batch"], global_batch=row["global_batch"], fsdp=True,
                recompute="full" if row["act_ckpt"] == "True" else "none",
                precision="fp8" if row["precision"] == "amp_fp8" else "bf16", software=software,
            ),
            platform=_node(row["gpu"], 8, 1600.0 if a100 else 3200.0),
            step_s=row["step_time_s_derived"],
        )  # fmt: skip


def _bigscience(rows: list[dict]) -> Iterator[Run]:
    """Megatron-DeepSpeed of 2021 on V100s."""
    for index, row in enumerate(rows):
        yield Run(
            id=f"row {index}",
            shape=_gpt(row["layers"], row["hidden"], row["heads"], row["vocab"], row["seq"]),
            layout=Layout(
                dp=row["dp"], tp=row["tp"], pp=row["pp"], micro_batch=row["micro_batch"], zero_stage=1,
                global_batch=row["global_batch"], recompute=row["recompute"], precision="fp16", software=_MEGATRON_2021,
            ),
            platform=_node("v100-sxm2-32gb", 4, 400.0),
            step_s=row["sec_per_it"],
            memory_bytes=row["mem_GB"] * 1e9,
            model="1.3B",
        )  # fmt: skip


def _korthikanti(rows: list[dict]) -> Iterator[Run]:
    """Each row twice: full recomputation, and sequence parallelism with selective recomputation."""
    for row in rows:
        for full in (True, False):
            v = row["interleave_v"]
            yield Run(
                id=f"{row['model']} {'full' if full else 'selective'}",
                shape=_gpt(row["layers"], row["hidden"], row["heads"], row["vocab"], row["seq"]),
                layout=Layout(
                    tp=row["tp"], pp=row["pp"], virtual_stages=v, schedule="interleaved" if v > 1 else "1f1b",
                    micro_batch=row["micro_batch"], global_batch=row["global_batch"], precision="fp16",
                    recompute="full" if full else "selective", sequence_parallel=not full,
                    software=replace(_MEGATRON_2021, tp_overlap="backward"),
                ),
                platform=_node("a100-sxm4-80gb", 8, 1600.0),
                step_s=row["iter_time_full_recompute_s" if full else "iter_time_seqpar_selective_s"],
            )  # fmt: skip


def _nanogpt(rows: list[dict]) -> Iterator[Run]:
    """nanoGPT compiled, its single GPU before fused attention; llm.c in CUDA; the micro-batch where the note states
    it. Left out: the row that the note rejects, and the one on characters, whose vocabulary is 65."""
    for row in rows:
        note = row["note"]
        if "REJECT" in note or "char" in row["code"]:
            continue
        words = note.replace(",", " ").replace(";", " ").split()
        micro = int(words[words.index("b") + 1]) if words[0] == "b" else 12
        heads = {768: 12, 1024: 16, 1280: 20, 1600: 25}[row["hidden"]]
        nano = row["code"].startswith("nano")
        yield Run(
            id=f"{row['code']} {row['gpus']}",
            shape=_gpt(row["layers"], row["hidden"], heads, 50304, row["seq"]),
            layout=Layout(
                dp=row["gpus"], micro_batch=micro, global_batch=row["tokens_per_step"] // row["seq"],
                zero_stage=row["zero_stage"],
                software=Software(compiled=True, flash=row["gpus"] > 1, attention=2 if nano else 3,
                                  fp32_gradients=nano, fused_optimizer=True),
            ),
            platform=_node("h100-sxm5-80gb" if "H100" in row["gpu"] else "a100-sxm4-80gb", 8, 1600.0),
            step_s=row["iter_time_s"],
        )  # fmt: skip


def _radius(rows: list[dict]) -> Iterator[Run]:
    """Megatron-LM on Perlmutter, gradients in fp32 after the backward pass; days over 300,000 iterations."""
    software = replace(_MEGATRON_2021, fp32_gradients=True, tp_overlap="backward")
    for row in rows:
        if row["wall_clock_days"] is None:
            continue
        yield Run(
            id=f"density {row['density_d']} period {row['update_T']}",
            shape=_gpt(row["layers"], row["hidden"], row["heads"], 50304, row["seq"]),
            layout=Layout(
                dp=row["dp"], micro_batch=row["micro_batch"], global_batch=row["global_batch"], recompute="full",
                density=row["density_d"] or 1.0, period=row["update_T"] or 1, software=software,
            ),
            platform=platform_of(find_machine("perlmutter")),
            step_s=row["s_per_iter_if_300k"],
        )  # fmt: skip


SOURCES: dict[str, Callable[[list[dict]], Iterator[Run]]] = {
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
}


@lru_cache(maxsize=32)
def runs(source: str) -> tuple[Run, ...]:
    """The runs of one published table."""
    return tuple(SOURCES[source](published.verified(published.table(source))))
