"""Steps of a pipeline on one time axis, for lesson 06.

schedule_plots.draw({"GPipe": events, "1F1B": others})      # events of all ranks, of `trace.traced`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import matplotlib.pyplot as plt

from aiscale.measure import plots
from aiscale.measure.plots import style
from aiscale.plan.cost import Event


def draw(steps: Mapping[str, Sequence[Event]]) -> None:
    """A panel for each step: a rank's waiting is hatched, and its most micro-batches in flight stand at the right."""
    size = {"figsize": (7.5, 0.8 + 1.5 * len(steps)), "layout": "constrained"}
    axes, longest = plt.subplots(len(steps), 1, sharex=True, squeeze=False, **size)[1][:, 0], 0.0
    for ax, (name, events) in zip(axes, steps.items(), strict=True):
        plots.pipeline(events, ax=ax)
        end = max(bar.get_x() + bar.get_width() for bar in ax.patches)
        longest = max(longest, end)
        most = [in_flight([event for event in events if event.rank == rank]) for rank in range(len(ax.get_yticks()))]
        waiting = {"facecolor": "none", "edgecolor": style.FAINT, "hatch": "////", "linewidth": 0, "zorder": 0}
        ax.barh(range(len(most)), end, 0.84, **waiting)
        for rank, count in enumerate(most):
            ax.text(1.01, rank, f"{count}", transform=ax.get_yaxis_transform(), va="center", color=style.MUTED)
        ax.set_ylabel(name)
    for ax in axes[1:]:
        ax.get_legend().remove()
        axes[0].set_xlabel("")
    axes[0].set_xlim(0, longest)
    axes[0].text(1.01, 1.02, "in flight", transform=axes[0].transAxes, color=style.MUTED, fontsize=8)


def in_flight(events: Sequence[Event]) -> int:
    """The most micro-batches of one rank whose forward pass has begun and whose backward pass is not over."""
    changes = [(e.start_s, 1) for e in events if e.kind == "forward"]
    changes += [(e.end_s, -1) for e in events if e.kind == "backward"]
    return max(accumulate(change for _, change in sorted(changes)))
