"""Runs as rows of a table: columns as in the published sweep of nanotron, an answer for each row.

    for answer in answers(csv.DictReader(open("runs.csv"))): print(answer["id"], answer["step_time_s"])

An empty cell, or a column that is missing, takes its value of DEFAULTS; `dp` that which fills the GPUs. The software is
an eager PyTorch program with fused attention. A row that no one could run has empty fields and an `error`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from aiscale.config import ConfigError
from aiscale.plan.answer import plan
from aiscale.plan.hardware import Platform, platform
from aiscale.plan.layout import Layout, Shape

DEFAULTS: dict[str, str] = {
    "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "0", "ffn": "0", "mlp": "gelu", "vocab": "50304",
    "tied": "False", "seq": "2048", "gpu": "A100-80GB-SXM", "gpus_per_node": "8", "network_gbit_per_node": "1600",
    "gpus": "8", "dp": "0", "tp": "1", "pp": "1", "virtual_stages": "1", "micro_batch": "1", "global_batch": "0",
    "zero_stage": "0", "fsdp": "False", "recompute": "none", "sequence_parallel": "False", "precision": "bf16",
}  # fmt: skip
FIELDS = (
    "params_B", "step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct", "memory_GB", "fits",
    "bubble_fraction", "exposed_comm_fraction",
)  # fmt: skip
_shape = lru_cache(maxsize=4096)(Shape)  # rows of one model share what is remembered of it


def answers(rows: Iterable[dict[str, str]]) -> Iterator[dict]:
    for number, row in enumerate(rows):
        name = row.get("id") or f"row {number}"
        try:
            known = read(row).to_dict()
            yield {"id": name} | {field: known[field] for field in FIELDS}
        except ConfigError as error:
            yield {"id": name} | dict.fromkeys(FIELDS) | {"fits": False, "error": str(error)}


def read(row: dict[str, str]):
    """The answer for one row; raises ConfigError that names the cell."""
    cells = {key: (row.get(key) or default).strip() for key, default in DEFAULTS.items()}

    def whole(key: str) -> int:
        try:
            value = float(cells[key])
            if value != int(value) or value < 0:
                raise ValueError
        except (ValueError, OverflowError):
            raise ConfigError(f"{key} is {cells[key]!r}: it must be a whole number, 0 or more") from None
        return int(value)

    def flag(key: str) -> bool:
        if cells[key].lower() not in ("true", "false", "1", "0"):
            raise ConfigError(f"{key} is {cells[key]!r}: it must be True or False")
        return cells[key].lower() in ("true", "1")

    tp, pp, gpus = whole("tp"), whole("pp"), whole("gpus")
    dp = whole("dp") or max(1, gpus // max(1, tp * pp))
    if dp * tp * pp != gpus:
        raise ConfigError(f"dp {dp} x tp {tp} x pp {pp} = {dp * tp * pp}, but gpus is {gpus}: change one of them")
    if cells["mlp"] not in ("gelu", "swiglu", "relu"):
        raise ConfigError(f"mlp is {cells['mlp']!r}: it may be gelu, relu or swiglu")
    v, micro = whole("virtual_stages"), whole("micro_batch")
    shape = _shape(
        layers=whole("layers"), hidden=whole("hidden"), heads=whole("heads"), kv_heads=whole("kv_heads"),
        ffn=whole("ffn"), gated=cells["mlp"] == "swiglu", vocab=whole("vocab"), tied=flag("tied") and pp == 1,
        seq=whole("seq"),
    )  # fmt: skip
    layout = Layout(
        dp=dp, tp=tp, pp=pp, virtual_stages=v, schedule="interleaved" if v > 1 else "1f1b", micro_batch=micro,
        global_batch=whole("global_batch") or dp * micro, zero_stage=whole("zero_stage"), fsdp=flag("fsdp"),
        recompute=cells["recompute"], sequence_parallel=flag("sequence_parallel") and tp > 1,
        precision=cells["precision"],
    )  # fmt: skip
    return plan(shape, layout, _platform(cells["gpu"], whole("gpus_per_node"), cells["network_gbit_per_node"]))


@lru_cache(maxsize=256)
def _platform(name: str, devices: int, gbit: str) -> Platform:
    try:
        network = float(gbit)
    except ValueError:
        raise ConfigError(f"network_gbit_per_node is {gbit!r}: it must be a number of Gb/s") from None
    return platform(name, gpus_per_node=max(1, devices), node_gbit_s=network)
