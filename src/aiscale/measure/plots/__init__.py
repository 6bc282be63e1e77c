"""Every figure, in one style (`plots.style`): functions take data and return Axes, or an array."""

from aiscale.measure.plots.bars import (
    COLLECTIVE_COLORS,
    PART_COLORS,
    memory_bars,
    published_vs_measured,
    traffic_bars,
)
from aiscale.measure.plots.collectives import collective, guessed, latency_bandwidth
from aiscale.measure.plots.curves import loss_curves, speedup, study_ratios
from aiscale.measure.plots.one_step import pipeline, timeline
from aiscale.measure.plots.sparsity import density_times, link_speedups, perplexity_trend
from aiscale.measure.plots.style import (
    MEMORY_COLORS,
    RANK_COLORS,
    STRATEGY_COLORS,
    draw,
    format_bytes,
    format_count,
    format_seconds,
    use_style,
)
