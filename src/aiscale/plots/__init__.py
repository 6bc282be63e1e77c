"""Every figure, in one style. Functions take data and return Axes (several panels: an array of Axes).

    from aiscale import plots
    plots.use_style()
    plots.loss_curves({"serial": losses})

A number on a figure is measured (filled), predicted (dashed) or published (hollow): see `plots.style`.
"""

from aiscale.plots.bars import COLLECTIVE_COLORS, memory_bars, published_vs_measured, traffic_bars
from aiscale.plots.collectives import collective, guessed, latency_bandwidth, message_count, ring_states, ring_steps
from aiscale.plots.curves import loss_curves, loss_difference, speedup
from aiscale.plots.describe import describe
from aiscale.plots.field import divided, field_map
from aiscale.plots.kernels import product_tiles, thread_blocks, warp_reads
from aiscale.plots.nodes import node
from aiscale.plots.numbers import FORMATS, matrices, number_formats, value_range
from aiscale.plots.one_step import memory_over_time, pipeline, step_memory, timeline
from aiscale.plots.placement import fsdp_step, mlp_cut, rank_grid, rendezvous, shards, zero_stages
from aiscale.plots.sparsity import (
    density_times,
    link_speedups,
    mask_overlap,
    perplexity_bytes,
    perplexity_trend,
    radius_curves,
)
from aiscale.plots.studies import radius_long_curves, radius_page, study_drift, study_ratios
from aiscale.plots.style import (
    MEMORY_COLORS,
    RANK_COLORS,
    STRATEGY_COLORS,
    draw,
    format_bytes,
    format_count,
    format_seconds,
    use_style,
)
from aiscale.plots.transformer import PART_COLORS, attention_masks, parameter_breakdown, transformer_layer
