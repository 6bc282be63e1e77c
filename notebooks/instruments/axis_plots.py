"""What each kind of parallelism sends, and how long tensor parallelism waits for it: the figure of lesson 07.

axis_plots.draw({"tensor": 126 * GiB, ...}, {"in a node": 0.7, "across nodes": 2.2})
"""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt

from aiscale.measure.plots import style


def draw(sent: Mapping[str, float], sending: Mapping[str, float]) -> None:
    """Bytes that a rank sends in a step, by axis; and for each place the time of sending over that of computing."""
    _, (left, right) = plt.subplots(1, 2, figsize=(7.5, 1.9), layout="constrained")
    bars = left.barh(list(sent), [nbytes / 2**30 for nbytes in sent.values()], color=style.MUTED)
    left.bar_label(bars, [f"{nbytes / 2**30:.3g}" for nbytes in sent.values()], padding=4)
    left.set(xlabel="a rank sends in a step (GiB)", xlim=(0, 1.2 * max(sent.values()) / 2**30))
    colors = {"computing": style.EVENT_COLORS["backward"], "sending": style.EVENT_COLORS["communication"]}
    right.barh(list(sending), 1, color=colors["computing"])
    right.barh(list(sending), sending.values(), left=1, color=colors["sending"])
    right.set_xlabel("time of a block (its computing = 1)")
    style.legend_above(right, style.legend_handles(colors, bars=True))
    for ax in (left, right):
        ax.invert_yaxis()
        style.for_bars(ax)
