"""Readers of the tables of other programs: nanotron, InternEvo, torchtitan, llm-foundry, nanoGPT and llm.c."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from aiscale.plan.layout import Layout, Software
from aiscale.plan.runs import Run, gpt, llama, node

GIB = 2.0**30


def nanotron(rows: list[dict]) -> Iterator[Run]:
    """Eager, asynchronous tensor parallelism, split by cost; memory of the first stage by torch's counters."""
    software = Software(split="cost")
    for row in rows:
        gpus, speed, memory = row["gpus"], row["measured_tokens_per_s_per_gpu"], row["measured_memory_GB"]
        yield Run(
            id=row["id"],
            shape=llama(
                row["layers"], row["hidden"], 32, 32, row["ffn"], row["vocab"],
                row["tied"] == "True" and row["pp"] == 1, row["seq"],
            ),
            layout=Layout(
                dp=row["dp"], tp=row["tp"], pp=row["pp"], micro_batch=row["micro_batch"],
                global_batch=row["global_batch"], zero_stage=row["zero_stage"], sequence_parallel=True,
                software=software,
            ),
            platform=node("h100-sxm5-80gb", 8, 3200.0),
            step_s=row["global_batch"] * row["seq"] / (speed * gpus) if speed else None,
            memory_bytes=memory * 1e9 if memory else None,
            ran=row["ran"] == "True",
            model=f"{row['layers']} layers, {gpus} GPUs",
            first_stage=True,
        )  # fmt: skip


def internevo(rows: list[dict]) -> Iterator[Run]:
    """Fused attention; states over all ranks or inside a node, returned by one broadcast an owner."""
    for row in rows:
        words = row["note"].split()
        shards = 0 if "all" in words else int(words[words.index("ranks") - 1])
        software = Software(
            shard_ranks=shards, broadcasts=True, fp32_gradients=False, tp_overlap="none", fused_optimizer=True
        )
        yield Run(
            id=row["id"],
            shape=llama(32, 4096, 32, 32, 11008, row["vocab"], False, row["seq"]),
            layout=Layout(
                dp=row["dp"], tp=row["tp"], micro_batch=row["micro_batch"], global_batch=row["global_batch"],
                zero_stage=1, recompute=row["recompute"], software=software,
            ),
            platform=node("a100-sxm4-80gb", 8, 400.0),
            step_s=row["global_batch"] * row["seq"] / (row["measured_tokens_per_s_per_gpu"] * row["gpus"]),
            model=f"{row['gpus']} GPUs, batch {row['global_batch']}",
        )  # fmt: skip


_LLAMA = {
    "8B": (32, 4096, 32, 8, 14336, 128256),
    "70B": (80, 8192, 64, 8, 28672, 128256),
    "405B": (126, 16384, 128, 8, 53248, 128256),
}


def torchtitan(rows: list[dict]) -> Iterator[Run]:
    """FSDP 2 with torch.compile except where the table says otherwise; H100s of 500 W and 2.4 TB/s; in a
    pipeline as many micro-batches as pieces, the default of the time. Float8 by row, a trial, is left out."""
    capped = replace(node("h100-sxm5-80gb", 8, 3200.0), memory_bytes=96e9, memory_bytes_s=2.4e12)
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
            shape=llama(layers, hidden, heads, keys, ffn, vocab, False, row["seq"]),
            layout=Layout(
                dp=row["fsdp"], tp=row["tp"], pp=pp, cp=row["cp"], fsdp=True, recompute=recompute,
                virtual_stages=2 if interleaved else 1, schedule="interleaved" if interleaved else "1f1b",
                micro_batch=max(1, row["local_batch"] // pieces), global_batch=row["global_batch"],
                sequence_parallel=row["tp"] > 1, precision="fp8" if "float8" in words else "bf16",
                software=software,
            ),
            platform=node("h200-sxm-141gb", 8, 3200.0) if h200 else capped,
            step_s=row["seq"] * row["global_batch"] / (row["tokens_per_s_per_gpu"] * row["gpus"]),
            memory_bytes=row["peak_mem_GiB"] * GIB if row["peak_mem_GiB"] else None,
        )  # fmt: skip


def foundry(rows: list[dict]) -> Iterator[Run]:
    """Composer's FSDP, eager, fused attention; gradients travel in fp32 except in mode PURE."""
    for row in rows:
        a100 = row["gpu"].startswith("a100")
        software = Software(
            fp32_gradients=row["mp_mode"] != "PURE", regather=row["sharding"] == "FULL_SHARD", fused_optimizer=True
        )
        yield Run(
            id=f"{row['model']} {row['gpu']} {row['gpus']} seq {row['seq']}",
            shape=gpt(row["layers"], row["d_model"], row["heads"], row["vocab"], row["seq"]),
            layout=Layout(
                dp=row["gpus"], micro_batch=row["micro_batch"], global_batch=row["global_batch"], fsdp=True,
                recompute="full" if row["act_ckpt"] == "True" else "none",
                precision="fp8" if row["precision"] == "amp_fp8" else "bf16", software=software,
            ),
            platform=node(row["gpu"], 8, 1600.0 if a100 else 3200.0),
            step_s=row["step_time_s_derived"],
        )  # fmt: skip


def nanogpt(rows: list[dict]) -> Iterator[Run]:
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
            shape=gpt(row["layers"], row["hidden"], heads, 50304, row["seq"]),
            layout=Layout(
                dp=row["gpus"], micro_batch=micro, global_batch=row["tokens_per_step"] // row["seq"],
                zero_stage=row["zero_stage"],
                software=Software(compiled=True, flash=row["gpus"] > 1, attention=2 if nano else 3,
                                  fp32_gradients=nano, fused_optimizer=True),
            ),
            platform=node("h100-sxm5-80gb" if "H100" in row["gpu"] else "a100-sxm4-80gb", 8, 1600.0),
            step_s=row["iter_time_s"],
        )  # fmt: skip
