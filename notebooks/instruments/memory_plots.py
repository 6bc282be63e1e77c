"""Memory of one rank through a step of FSDP: the figure of lesson 05.

memory_plots.draw({"blocks freed": (levels, ends), "blocks kept": (levels, ends)}, ranks=4)
"""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt

from aiscale.measure.plots import style

KINDS = {
    "parameters, own": (["Sharded Param"], style.MEMORY_COLORS["parameters"]),
    "optimizer states": (["OptState"], style.MEMORY_COLORS["optimizer states"]),
    "parameters, gathered": (["Unsharded Param"], "tab:orange"),
    "message buffers": (["All Gather", "Reduce Scatter"], style.MEMORY_COLORS["buffers"]),
    "gradients": (["Sharded Grad", "Unsharded Grad"], style.MEMORY_COLORS["gradients"]),
    "activations, temporaries": (["Activation", "Temp", "Inputs"], style.MEMORY_COLORS["activations"]),
}


def draw(steps: Mapping[str, tuple[list[dict], list[int]]], ranks: int) -> None:
    """steps: for each run its bytes by torch's name of their kind, after each operation, and after how many operations
    forward and backward pass end. Of the update, which changes nothing more, only the beginning is shown."""
    figure, axes = plt.subplots(len(steps), 1, figsize=(7.5, 5.5), sharex=True, sharey=True, layout="constrained")
    colors = [color for _, color in KINDS.values()]
    for ax, (name, (levels, ends)) in zip(axes, steps.items(), strict=True):
        stack = [[sum(level.get(key, 0) for key in keys) / 2**20 for level in levels] for keys, _ in KINDS.values()]
        ax.stackplot(range(len(levels)), stack, labels=list(KINDS), colors=colors, step="post", linewidth=0)
        ddp = 4 * ranks * levels[0]["Sharded Param"] / 2**20  # 16 bytes a parameter, of which a rank has these 4
        ax.axhline(ddp, color=style.MUTED, linestyle=":", linewidth=1)
        ax.text(1, ddp, "DDP, without activations", va="bottom", fontsize=8, color=style.MUTED)
        for end in ends:
            ax.axvline(end, color=style.INK, linewidth=0.7)
        for place, word in zip([0, *ends], ("forward", "backward", "update"), strict=True):
            ax.text(place + 6, 0.8 * ddp, word, fontsize=8, color=style.INK)
        ax.set(ylabel=f"MiB, {name}", ylim=(0, 1.12 * ddp))
        ax.set_title(f"at most {max(map(sum, zip(*stack, strict=True))):.0f} MiB", loc="right", fontsize=9)
    axes[-1].set(xlabel="operations", xlim=(0, max(ends[-1] for _, ends in steps.values()) + 90))
    figure.legend(*axes[0].get_legend_handles_labels(), ncols=3, loc="outside upper left")
