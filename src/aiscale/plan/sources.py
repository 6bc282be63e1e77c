"""Published runs as the planner's input: each table's rows with what is known of the software that ran them.

    for run in runs("internevo_7b"): run.shape, run.layout, run.platform, run.step_s, run.memory_bytes, run.ran
    SOURCES                               # names of the tables, each with the reader of its rows

What a reader says of the software (fused attention, overlap, recomputation) is the software's, not fitted. Rows whose
model or layout the source leaves out are skipped, and so are rows that the table's note rejects. Left out as a whole:
AxonN's and Dash et al.'s runs, whose layouts are recalled, and MaxText's, whose tables leave out batch and layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from aiscale import published
from aiscale.plan import megatron_runs as megatron
from aiscale.plan import other_runs as others
from aiscale.plan.runs import Run

SOURCES: dict[str, Callable[[list[dict]], Iterator[Run]]] = {
    "nanotron_sweep": others.nanotron,
    "internevo_7b": others.internevo,
    "megatron_sc21_table1": megatron.sc21,
    "megatron_sc21_table2_zero3": megatron.sc21_zero3,
    "megatron_core_h100_weak_scaling": megatron.h100,
    "bloom_176b_topology_sweep": megatron.bloom,
    "forge_frontier_throughput": megatron.forge,
    "torchtitan_llama3": others.torchtitan,
    "llm_foundry_mpt_fsdp": others.foundry,
    "bigscience_1b3_v100_sweep": megatron.bigscience,
    "korthikanti_table5": megatron.korthikanti,
    "nanogpt_llmc": others.nanogpt,
    "radius_perlmutter": megatron.radius,
}


@lru_cache(maxsize=32)
def runs(source: str) -> tuple[Run, ...]:
    """The runs of one published table."""
    return tuple(SOURCES[source](published.verified(published.table(source))))
