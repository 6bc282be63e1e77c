"""Every figure, in one style. Functions take data and return Axes (several panels: an array of Axes).

    from aiscale import plots
    plots.use_style()
    plots.loss_curves({"serial": losses})

A number on a figure is measured (filled), predicted (dashed) or published (hollow): see `plots.style`.
"""

from aiscale.plots.anatomy import PART_COLORS, attention_masks, parameter_breakdown, transformer_layer
from aiscale.plots.collectives import collective, latency_bandwidth, ring_steps
from aiscale.plots.grid import rank_grid
from aiscale.plots.memory import memory_bars, memory_over_time
from aiscale.plots.messages import message_count
from aiscale.plots.numbers import FORMATS, matrices, matrix, number_formats
from aiscale.plots.pipeline import pipeline
from aiscale.plots.radius import (
    METHOD_COLORS,
    concentration,
    density_times,
    link_speedups,
    mask_change,
    mask_overlap,
    perplexity_bytes,
    perplexity_settings,
    perplexity_trend,
    radius_curves,
    residual_steps,
    step_bytes,
)
from aiscale.plots.ranges import value_range
from aiscale.plots.scaling import efficiency, published_vs_measured, speedup
from aiscale.plots.shards import shards, step_memory
from aiscale.plots.style import (
    EVENT_COLORS,
    MEMORY_COLORS,
    RANK_COLORS,
    STRATEGY_COLORS,
    draw,
    format_bytes,
    format_count,
    format_seconds,
    use_style,
)
from aiscale.plots.timeline import timeline
from aiscale.plots.traffic import COLLECTIVE_COLORS, traffic_bars
from aiscale.plots.training import learning_rates, loss_curves, loss_difference, loss_vs_batch

__all__ = [
    "COLLECTIVE_COLORS",
    "EVENT_COLORS",
    "FORMATS",
    "MEMORY_COLORS",
    "METHOD_COLORS",
    "PART_COLORS",
    "RANK_COLORS",
    "STRATEGY_COLORS",
    "attention_masks",
    "collective",
    "concentration",
    "density_times",
    "draw",
    "efficiency",
    "format_bytes",
    "format_count",
    "format_seconds",
    "latency_bandwidth",
    "learning_rates",
    "link_speedups",
    "loss_curves",
    "loss_difference",
    "loss_vs_batch",
    "mask_change",
    "mask_overlap",
    "matrices",
    "matrix",
    "memory_bars",
    "memory_over_time",
    "message_count",
    "number_formats",
    "parameter_breakdown",
    "perplexity_bytes",
    "perplexity_settings",
    "perplexity_trend",
    "pipeline",
    "published_vs_measured",
    "radius_curves",
    "rank_grid",
    "residual_steps",
    "ring_steps",
    "shards",
    "speedup",
    "step_bytes",
    "step_memory",
    "timeline",
    "traffic_bars",
    "transformer_layer",
    "use_style",
    "value_range",
]
