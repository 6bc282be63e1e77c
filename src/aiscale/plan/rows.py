"""Runs as rows of a table: columns as in the published sweep of nanotron, an answer for each row.

An empty cell, or a column that is missing, takes its value of DEFAULTS; `dp` that which fills the
GPUs, `etp` that of `tp`, as Megatron-Core has it. `program`: megatron or nanotron; auto: the one
that the row's id, note or source names, else works as Megatron. A row that no one could run has
empty fields and an `error`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Literal, get_type_hints

from aiscale.errors import ConfigError
from aiscale.plan.answer import plan
from aiscale.plan.config.run import as_type
from aiscale.plan.hardware import platform
from aiscale.plan.layout import PROGRAMS, Layout, Shape

DEFAULTS: dict[str, str] = {
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "0",
    "ffn": "0",
    "mlp": "gelu",
    "vocab": "50304",
    "tied": "False",
    "seq": "2048",
    "gpu": "A100-80GB-SXM",
    "gpus_per_node": "8",
    "network_gbit_per_node": "1600",
    "gpus": "8",
    "dp": "0",
    "tp": "1",
    "pp": "1",
    "virtual_stages": "1",
    "micro_batch": "1",
    "global_batch": "0",
    "zero_stage": "0",
    "fsdp": "False",
    "recompute": "none",
    "sequence_parallel": "False",
    "precision": "bf16",
    "program": "auto",
    "cp": "1",
    "cp_kind": "ring",
    "ep": "1",
    "etp": "0",
    "head_dim": "0",
    "experts": "0",
    "top_k": "0",
    "expert_ffn": "0",
    "shared_experts": "0",
    "dense_layers": "0",
    "capacity": "0",
    "q_rank": "0",
    "kv_rank": "0",
    "rope_width": "0",
}
#: Names that other tables give to these columns.
ALIASES = {
    "num_experts": "experts",
    "n_experts": "experts",
    "moe_experts": "experts",
    "topk": "top_k",
    "experts_per_token": "top_k",
    "moe_top_k": "top_k",
    "moe_ffn": "expert_ffn",
    "moe_intermediate_size": "expert_ffn",
    "expert_hidden": "expert_ffn",
    "capacity_factor": "capacity",
    "expert_parallel": "ep",
    "context_parallel": "cp",
}
#: Types of the cells: those of Shape and Layout, and of the other columns.
KINDS = get_type_hints(Shape) | get_type_hints(Layout)
KINDS |= {"gpu": str, "gpus": int, "gpus_per_node": int}
KINDS |= {"mlp": Literal["gelu", "relu", "swiglu"], "network_gbit_per_node": float}
KINDS |= {"program": Literal["auto", "megatron", "nanotron"]}
FIELDS = (
    "params_B",
    "step_time_s",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "mfu_pct",
    "memory_GB",
    "fits",
    "bubble_fraction",
    "exposed_comm_fraction",
    "step_time_s_band",
    "memory_GB_band",
)
SHAPE_CELLS = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "seq",
    "head_dim",
    "experts",
    "top_k",
    "expert_ffn",
    "shared_experts",
    "dense_layers",
    "capacity",
    "q_rank",
    "kv_rank",
    "rope_width",
)
_shape = lru_cache(maxsize=4096)(Shape)  # rows of one model share what is remembered of it


def answers(rows: Iterable[dict[str, str]]) -> Iterator[dict]:
    for number, row in enumerate(rows):
        name = row.get("id") or f"row {number}"
        try:
            answer = read(row).to_dict()
            yield {"id": name} | {field: answer[field] for field in FIELDS}
        except ConfigError as error:
            yield {"id": name} | dict.fromkeys(FIELDS) | {"fits": False, "error": str(error)}


def _dp(cells: dict) -> int:
    """The row's data-parallel ranks, or those that fill its GPUs."""
    tp, pp, cp, gpus = (cells[key] for key in ("tp", "pp", "cp", "gpus"))
    dp = cells["dp"] or max(1, gpus // max(1, tp * pp * cp))
    if dp * tp * pp * cp != gpus:
        product = f"dp {dp} x tp {tp} x pp {pp}" + (f" x cp {cp}" if cp > 1 else "")
        raise ConfigError(
            f"{product} = {dp * tp * pp * cp}, but gpus is {gpus}: change one of them"
        )
    return dp


def read(row: dict[str, str]):
    """The answer for one row; raises ConfigError that names the cell."""
    row = {ALIASES.get(key, key): cell for key, cell in row.items()}
    cells = {
        key: as_type(KINDS[key], (row.get(key) or default).strip(), key)
        for key, default in DEFAULTS.items()
    }
    dp, pieces = _dp(cells), cells["virtual_stages"]
    sizes = {key: cells[key] for key in SHAPE_CELLS}
    shape = _shape(gated=cells["mlp"] == "swiglu", tied=cells["tied"] and cells["pp"] == 1, **sizes)
    told = " ".join(row.get(key) or "" for key in ("id", "note", "source")).lower()
    words = (cells["program"], *re.findall("[a-z]+", told))
    named = next((name for name in PROGRAMS if name in words), "")
    same = (
        "tp",
        "pp",
        "cp",
        "cp_kind",
        "ep",
        "virtual_stages",
        "micro_batch",
        "zero_stage",
        "fsdp",
        "recompute",
        "precision",
    )
    layout = Layout(
        dp=dp,
        schedule="interleaved" if pieces > 1 else "1f1b",
        **{key: cells[key] for key in same},
        etp=cells["etp"] or (cells["tp"] if shape.experts else 1),
        global_batch=cells["global_batch"] or dp * cells["micro_batch"],
        sequence_parallel=cells["sequence_parallel"] and cells["tp"] > 1,
        software=PROGRAMS[named] if named else replace(PROGRAMS["megatron"], program=""),
    )
    network, devices = cells["network_gbit_per_node"], max(1, cells["gpus_per_node"])
    return plan(shape, layout, platform(cells["gpu"], gpus_per_node=devices, node_gbit_s=network))
