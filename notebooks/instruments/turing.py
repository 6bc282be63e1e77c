"""Figures of the Turing report: figure 2 by the planner (`python benchmarks/planner/turing.py`), figure 6 from a stored
grid of sizes, strategies and ranks (`make study STUDY=grid`)."""

import statistics

import matplotlib.pyplot as plt

from aiscale.measure import plots

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "fsdp", "3d"]
COLORS = {name: plots.STRATEGY_COLORS["megatron" if name == "3d" else name] for name in STRATEGIES}


def cells_of(grid):
    """{(size, ranks, strategy): (peak in MiB, epoch over that of the base)}; of two studies the larger peak and the
    mean ratio. A cell's name leaves out what is as in the base."""
    cells = {}
    for cell in grid["cells"]:
        words = {"size": "2x128", "ranks": 1, "strategy": "ddp"}
        words |= dict(part.partition(" ")[::2] for part in cell["cell"].split(", "))
        times = statistics.fmean(ratio["median"] for ratio in cell["ratio"])
        cells[words["size"], int(words["ranks"]), words["strategy"]] = max(cell["peak_bytes"]) / 2**20, times
    return cells


def panels(cells):
    """Memory above, time below; two ranks left, four right; a line for each strategy."""
    axes = plt.subplots(2, 2, figsize=(7.5, 4.6), sharex=True, sharey="row", layout="constrained")[1]
    for (row, column), ax in ((place, axes[place]) for place in ((0, 0), (0, 1), (1, 0), (1, 1))):
        for name, color in COLORS.items():
            points = {size: both[row] for (size, n, used), both in cells.items() if (n, used) == (2 + 2 * column, name)}
            sizes = sorted(points, key=lambda size: [int(n) for n in size.split("x")][::-1])
            plots.draw(ax, "measured", sizes, [points[size] for size in sizes], color)
        ax.set_ylim(0, None)
        ax.set(xlabel=f"layers x width, {2 + 2 * column} ranks" if row else "")
    axes[0, 0].set(ylabel="peak of a rank (MiB)")
    axes[1, 0].set(ylabel="epoch, over the base")
    axes[0, 0].figure.legend(handles=plots.style.legend_handles(COLORS), loc="outside upper center", ncols=6)
    return axes


def over_fsdp(cells, ranks, published):
    """Memory and time over those of FSDP: `published` {strategy: (memory, time)}, and a dot for each size of ours."""
    axes = plt.subplots(1, 2, figsize=(7.5, 2.6), sharey=True, layout="constrained")[1]
    for figure, ax in enumerate(axes):
        for y, (name, theirs) in enumerate(published.items()):
            units = {size: both[figure] for (size, n, used), both in cells.items() if (n, used) == (ranks, "fsdp")}
            ratios = [cells[size, ranks, name][figure] / unit for size, unit in units.items()]
            plots.draw(ax, "published", [theirs[figure]], [y])
            plots.draw(ax, "measured", ratios, [y + 0.25] * len(ratios), linestyle="")
        ax.set(xlabel=("peak memory", "epoch")[figure] + " over that of FSDP", xlim=(0, None), ylim=(3.6, -0.4))
        ax.axvline(1, color=plots.style.MUTED, linestyle=":")
    axes[0].set_yticks(range(len(published)), published)
    handles = plots.style.kind_handles(["measured", "published"], source="Turing report")
    axes[0].figure.legend(handles=handles, loc="outside upper left", ncols=2)
    return axes


def ranges(rows):
    """Published and predicted ranges of each ratio, one line each."""
    ax = plots.style.new_axes(None, 7.5, 0.8 + 0.32 * len(rows))
    for y, row in enumerate(rows):
        plots.draw(ax, "published", row["published"], [y, y], linestyle="-")
        plots.draw(ax, "predicted", row["predicted"], [y + 0.3] * 2)
    ax.set(yticks=range(len(rows)), yticklabels=[row["ratio"] for row in rows], ylim=(len(rows) - 0.3, -0.5))
    ax.set(xlabel="ratio of times", xlim=(0, None))
    ax.axvline(1, color=plots.style.MUTED, linestyle=":")
    plots.style.legend_above(ax, plots.style.kind_handles(["predicted", "published"], source="Turing report"))
    return ax
