"""The drawings of lessons and decks that show an idea and nothing measured: SVG files beside this script.

    python notebooks/figures/draw.py              # all of them
    python notebooks/figures/draw.py layer rendezvous   # these

A notebook shows one by `![what it shows](figures/layer.svg)`, a deck by `![...](../notebooks/figures/layer.svg)`.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import combinations
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle

from aiscale.measure import plots
from aiscale.measure.plots import style
from aiscale.plan import cost, machines
from aiscale.plan.config import ModelConfig
from aiscale.plan.presets import model_of

RANKS = 4
PARTS = {"parameters": "weights", "gradients": "gradients", "optimizer states": "Adam"}
WEIGHTS, GRADIENTS, DATA = (style.MEMORY_COLORS[part] for part in ("parameters", "gradients", "activations"))
BORROWED = style.tint(WEIGHTS, 0.3)  #: weights that belong to another rank
#: Shares of the batch: greys, since the first ranks' colours are nearly those of weights and gradients.
SHARES = ("#24272D", "#6B7280", "#A4AAB4", "#D3D7DD")


def box(ax, x, y, width, height, color, text="", size=8, **look):
    """A box from its corner (x, y), and text in it."""
    ax.add_patch(Rectangle((x, y), width, height, **{"facecolor": color, "linewidth": 0, **look}))
    if text:
        say(ax, x + width / 2, y + height / 2, text, size, color=style.text_color(color))


def frame(ax, x, y, width, height, color=style.FAINT, linewidth=0.8, **look):
    box(ax, x, y, width, height, "none", edgecolor=color, linewidth=linewidth, **look)


def say(ax, x, y, text, size=8.5, **look):
    ax.text(x, y, text, **{"fontsize": size, "color": style.INK, "ha": "center", "va": "center", **look})


def tile(ax, x, y, width, height, color, text="", size=8.5, **look):
    """A box with round corners around (x, y), and text in it."""
    look = {"facecolor": color, "edgecolor": "none", "zorder": 4, **look}
    style.rounded(ax, (x - width / 2, y - height / 2), width, height, 0.1, **look)
    say(ax, x, y, text, size, color=style.text_color(color), zorder=5)


def arrow(ax, start, end, head="-|>,head_length=4,head_width=2.2", color=style.INK, width=1.2, **look):
    look = {"color": color, "linewidth": width, "shrinkA": 0, "shrinkB": 0, **look}
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle=head, **look))


def view(ax, left, right, bottom, top, aspect="equal", names=None, bars=True):
    """Show this part of the plane without axes; names: {label: colour} of the legend."""
    ax.set(xlim=(left, right), ylim=(bottom, top))
    ax.set_axis_off()
    ax.set_aspect(aspect)
    style.legend_above(ax, style.legend_handles(names or {}, bars=bars))


def by_row(rank, part, layer, row):
    return row == rank


def by_layer(*divided):
    """Ranks share these parts by layers, and each has all of the others."""
    return lambda rank, part, layer, row: part not in divided or layer == rank


ONE_BATCH = (0, 0, 0, 0)
#: Title, what ranks send, whether a rank holds (part, layer, row), and which share of the batch each rank reads.
# ZeRO's first stages lay all tensors into one long row and cut that, which looks like a cut by layers.
WAYS = {
    "ddp": ("DDP", "gradients, once a step", by_layer()),
    "zero1": ("ZeRO-1", "gradients, then new weights,\nonce a step", by_layer("optimizer states")),
    "zero2": ("ZeRO-2", "each gradient to its owner,\nthen new weights", by_layer("optimizer states", "gradients")),
    "fsdp": ("FSDP, ZeRO-3", "a layer's weights before each use,\ngradients to their owners", by_row),
    "tp": ("tensor parallel", "activations, in every layer", by_row, ONE_BATCH),
    "pp": ("pipeline parallel", "activations, from stage to stage", by_layer(*PARTS), ONE_BATCH),
    "ep": (
        "expert parallel",
        "tokens to their experts and back,\ngradients of what is copied",
        lambda rank, part, layer, row: layer % 2 == 0 or row == rank,  # every other layer is made of experts
    ),
    "3d": (
        "3D: tp 2 × pp 2 × dp 2",
        "activations in layers and between\nstages, gradients once a step",
        lambda rank, part, layer, row: row // 2 == rank % 2 and layer // 2 == rank // 4,
        (0, 0, 1, 1, 0, 0, 1, 1),
    ),
}


#: The eight ranks of "3d": tensor-parallel neighbours first, then copies, then stages.
COPIES = [(rank, f"{rank}: copy {rank // 2 % 2}, stage {rank // 4}") for rank in range(8)]


def divided(*names, order=()):
    """A panel per strategy: a row for each rank, and in it what it computes and what it holds of each part.

    A part is drawn as four layers side by side, each of four rows; what the rank does not hold is left empty. What it
    computes is drawn in the same way, in the grey of its share of the batch. order: lines other than ranks by number.
    """
    columns = min(4 if len(names) > 6 else 3, len(names))
    rows = -(-len(names) // columns)
    size = (2.6 * columns, 0.35 + 1.95 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for ax, name in zip(axes.flat, names, strict=True):
        way(ax, *WAYS[name], borrows=name == "fsdp", order=order)
    colors = {text: style.MEMORY_COLORS[part] for part, text in PARTS.items()}
    colors |= {"weights of other ranks, for a moment": BORROWED} if "fsdp" in names else {}
    figure.legend(handles=style.legend_handles(colors, bars=True), loc="outside upper center", ncols=4)


def way(ax, title, sends, holds, shares=(0, 1, 2, 3), borrows=False, order=()):
    scale = 4 / len(shares)  # eight ranks take the room of four
    for line, (rank, label) in enumerate(order or [(rank, f"rank {rank}") for rank in range(len(shares))]):
        share, top, tall = shares[rank], 1.08 * scale * line, 0.8 * scale
        say(ax, -0.2, top + tall / 2, label, 7, ha="right", color=style.MUTED)
        for number, part in enumerate((None, *PARTS)):
            if part == "parameters" and borrows:
                box(ax, 1.5 * number, top, 1.2, tall, BORROWED)
            for layer in range(4):
                # a rank computes with the weights that it has, its own or borrowed
                rows = [row for row in range(4) if holds(rank, part or "parameters", layer, row)]
                rows = range(4) if borrows and not part else rows
                if rows:  # one box for all: what a rank holds of a layer lies together
                    place = (1.5 * number + 0.3 * layer, top + rows[0] * tall / 4, 0.3, len(rows) * tall / 4)
                    color = style.MEMORY_COLORS[part] if part else SHARES[share]
                    box(ax, *place, color, edgecolor=style.PAPER, linewidth=0.5)
            frame(ax, 1.5 * number, top, 1.2, tall)
    say(ax, 0.6, -0.12, "computes", 6.5, va="baseline", color=style.MUTED)
    say(ax, 3.6, -0.12, "holds", 6.5, va="baseline", color=style.MUTED)
    say(ax, -1.05, 4.37, f"sends {sends}", 7.5, ha="left", va="top", linespacing=1.3)
    say(ax, -1.05, -0.45, title, 9.5, ha="left", va="baseline", weight="bold")
    view(ax, -1.05, 5.8, 5.12, -0.8, aspect="auto")


def ring_states(world):
    """A ring all-reduce: (state, received) at the start and after each of its 2 (n - 1) steps.

    state[rank][chunk] is the set of ranks whose values are in the sum; received lists the (rank, chunk) that arrived.
    In step s rank r sends chunk r - s - 1 to rank r + 1; n - 1 receivers add, n - 1 overwrite.
    """
    state = [[{rank}] * world for rank in range(world)]
    states = [(state, [])]
    for step in range(2 * (world - 1)):
        before, state, received = state, [list(row) for row in state], []
        for rank in range(world):
            to, chunk = (rank + 1) % world, (rank - step - 1) % world
            state[to][chunk] = before[to][chunk] | before[rank][chunk]
            received.append((to, chunk))
        states.append((state, received))
    return states


def ring(half, world=RANKS):
    """Rows are ranks, columns chunks, stripes the ranks whose values are in a sum; framed: what has just arrived."""
    across, first = world + 1.1, half * (world - 1)
    ax = style.new_axes(None, 7.5, 2.4)
    for column, (state, received) in enumerate(ring_states(world)[first : first + world]):
        left = column * across
        for rank, row in enumerate(state):
            for chunk, members in enumerate(row):
                x, y, stripe = left + chunk + 0.06, world - rank - 0.94, 0.88 / world
                box(ax, x, y, 0.88, 0.88, "#F1F3F6")
                for member in members:
                    box(ax, x + member * stripe, y, stripe, 0.88, style.RANK_COLORS[member])
                if column and (rank, chunk) in received:
                    frame(ax, x, y, 0.88, 0.88, style.INK, 1.6)
                    arrow(ax, (x + 0.44, y + 1.36), (x + 0.44, y + 0.84), zorder=5)
        below = f"step {first + column}" if column else "after step 3" if half else "start"
        say(ax, left + world / 2, -0.3, below, 9, va="top", color=style.MUTED)
    for rank in range(world):
        say(ax, -0.3, world - rank - 0.5, f"rank {rank}", ha="right", color=style.MUTED)
    view(ax, -2.1, world * across - 0.9, -1.0, world + 0.5)
    names = {f"from rank {rank}": style.RANK_COLORS[rank] for rank in range(world)}
    style.legend_above(ax, style.legend_handles(names, bars=True))


def broadcast_rounds(world=8):
    """Who has rank 0's tensor after each round, and who sends: passed on along a ring, and spread by a tree."""
    ax, left = plt.subplots(figsize=(7.5, 2.9), layout="constrained")[1], 0
    ring = [[(rank, rank + 1)] for rank in range(world - 1)]
    tree = [[(rank, rank + have) for rank in range(have)] for have in (1, 2, 4) if have < world]
    for name, rounds, apart in (("ring", ring, 1.4), ("tree", tree, 2.4)):
        have = {0}
        for number, sends in enumerate([[], *rounds]):
            x = left + apart * number
            have |= {to for _, to in sends}
            for rank in range(world):
                color = style.RANK_COLORS[0] if rank in have else style.PAPER
                tile(ax, x, -rank, 0.8, 0.8, color, edgecolor=style.FAINT)
            for source, to in sends:
                arrow(ax, (x - apart + 0.4, -source), (x - 0.4, -to), zorder=6)
            say(ax, x, 0.75, number or "start", 8, color=style.MUTED)
        say(ax, (left + x) / 2, 1.6, f"{name}: {len(rounds)} rounds", 9)
        left = x + 3.2
    for rank in range(world):
        say(ax, -0.8, -rank, f"rank {rank}", 8, ha="right", color=style.MUTED)
    view(ax, -3, left - 2.5, 0.3 - world, 2.1)


def rendezvous():
    """Two ranks meet at a store: rank 0 waits, rank 1 signs in, both connect."""
    axes = plt.subplots(1, 3, figsize=(7.5, 2.5), layout="constrained")[1]
    titles = ("1  rank 0 opens the store", "2  rank 1 signs in", "3  ranks connect")
    for ax, title, does in zip(axes, titles, (["signs in"], ["reads", "signs in, reads"], []), strict=True):
        present = len(does) or 2
        say(ax, 1.3, 2.15, title)
        store = "\n".join(f"rank {rank}: here" for rank in range(present))
        tile(ax, 1.3, 1.35, 1.54, 0.7, style.tint(style.MUTED, 0.15), store, 7.5, edgecolor=style.MUTED)
        for rank in range(present):
            tile(ax, 2.6 * rank, 0, 1.04, 0.52, style.RANK_COLORS[rank], f"rank {rank}", 8)
        if present == 1:
            tile(ax, 2.6, 0, 1.04, 0.52, style.PAPER, "not yet", 8, edgecolor=style.MUTED, linestyle=":")
        for rank, word in enumerate(does):
            side = 2 * rank - 1
            arrow(ax, (2.6 * rank, 0.3), (1.3 + 0.35 * side, 0.97))
            say(ax, 1.3 + 0.95 * side, 0.62, word, 7.5, ha="left" if rank else "right")
        view(ax, -0.75, 3.35, -0.75, 2.4)
    arrow(axes[2], (0.55, 0), (2.05, 0), head="<|-|>,head_length=4,head_width=2.2", width=1.6)
    say(axes[2], 1.3, -0.16, "data", 7.5, va="top")


AXES = {"tensor": "tp", "pipeline": "pp", "data": "ddp"}
AXES = {axis: style.STRATEGY_COLORS[name] for axis, name in AXES.items()}


def rank_grid(tp, pp, dp, per_node, mine=5):
    """A panel per copy of the model, a row per stage, a column per tensor-parallel rank; nodes differ in shade.

    rank = t + tp (d + dp p), Megatron-Core's order. Framed are the three groups of the rank `mine`.
    """
    ax = style.new_axes(None, min(7.5, 1.2 + 0.6 * dp * (tp + 0.9)), 1.0 + 0.6 * pp)
    places = {t + tp * (d + dp * p): (t, p, d) for t in range(tp) for p in range(pp) for d in range(dp)}
    for rank, (t, p, d) in places.items():
        x = d * (tp + 0.9) + t
        box(ax, x, p, 0.92, 0.92, style.tint(style.MUTED, (0.12, 0.42)[rank // per_node % 2]), str(rank), 9)
        for axis, color in enumerate(AXES.values()):
            if all(a == b for i, (a, b) in enumerate(zip((t, p, d), places[mine], strict=True)) if i != axis):
                inset = 0.06 * axis
                frame(ax, x + inset, p + inset, 0.92 - 2 * inset, 0.92 - 2 * inset, color, 2.2)
    for d in range(dp):
        say(ax, d * (tp + 0.9) + tp / 2, -0.25, f"copy {d}", 9, va="bottom", color=style.MUTED)
    for p in range(pp):
        say(ax, -0.2, p + 0.46, f"stage {p}", 9, ha="right", color=style.MUTED)
    names = {f"rank {mine}'s {name} group": color for name, color in AXES.items()}
    view(ax, -1.6, dp * (tp + 0.9) - 0.7, pp + 0.15, -0.7, names=names, bars=False)


def node(name):
    """The devices of one node of this machine, what joins them, and its adapters; lines widen with the bandwidth."""
    machine, ax = machines.find_machine(name), style.new_axes(None, 5.0, 3.7)
    inside, network = machine.node, machine.network
    device, mate, link, nic = (style.RANK_COLORS[i] for i in (0, 6, 2, 4))
    half, gap = inside.devices // 2, 2.0 if inside.devices > 4 else 3.2
    above = [(i * gap, 2.0) for i in range(half)]
    places, right = above + [(x, 0.0) for x, _ in above[::-1]], above[-1][0]  # around: a ring crosses nothing
    pairs = combinations(places, 2) if inside.pair_gb_s else zip(places, places[1:] + places[:1], strict=True)
    for (x, y), (x1, y1) in pairs:
        ax.plot([x, x1], [y, y1], color=link, linewidth=0.4 * (inside.pair_gb_s or inside.ring_gb_s) ** 0.5, zorder=2)
    for (x, y), (x1, _) in zip(places[::2], places[1::2], strict=True) if inside.mate_gb_s else ():
        tile(ax, (x + x1) / 2, y, gap + 1.56, 1.56, style.tint(mate, 0.16), zorder=1)
        ax.plot([x, x1], [y, y], color=mate, linewidth=0.4 * inside.mate_gb_s**0.5, zorder=3)
    for number, (x, y) in enumerate(places):
        tile(ax, x, y, 1.12, 1.12, device, str(number), 9.5)
    tile(ax, right / 2, 0.675, right + 2.2, 4.85, style.PAPER, zorder=0, edgecolor=style.MUTED, linewidth=1.2)
    width = (right + 1.8) / network.nics
    for x in (-0.9 + width * (i + 0.5) for i in range(network.nics)):
        ax.plot([x, x], [-1.75, -2.75], color=nic, linewidth=0.4 * network.nic_gb_s**0.5 + 0.6)
        tile(ax, x, -1.75, min(1.04, 0.84 * width), 0.6, nic, "NIC", 9.5)
    tile(ax, right / 2, -2.98, right + 2.2, 0.55, style.tint(nic, 0.16), network.topology, 9)
    say(ax, right / 2, 3.6, f"{inside.devices} × {inside.accelerator.name.upper()}", 10)
    view(ax, -1.4, right + 1.4, -3.5, 4.0)


def layer(model):
    """One block: operations, the shapes of their weights and outputs, parameters; at the left the residual stream."""
    D, F, size = model.d_model, model.ff_width, cost.layer_parameters(model)
    down = D * F + D * model.bias
    norm = ("layer norm", "norms", f"{D}", size["norms"] // 2, D)
    boxes = [  # name, part, shape or a word, parameters, width of the output
        norm,
        ("q, k, v", "attention", f"{D} × {3 * D}", size["qkv"], 3 * D),
        ("attention", "", f"{model.n_head} heads\nof {model.d_head}", 0, D),
        ("out", "attention", f"{D} × {D}", size["attention_out"], D),
        norm,
        ("up", "mlp", f"{D} × {F}", size["mlp"] - down, F),
        ("GELU", "", "each number\nby itself", 0, F),
        ("down", "mlp", f"{F} × {D}", down, D),
    ]
    ax, right, muted = style.new_axes(None, 7.5, 4.5), 8.07, {"size": 8, "ha": "left", "color": style.MUTED}
    arrow(ax, (0, 1.0), (0, -4.05), width=1.8)
    say(ax, 0.14, 0.9, f"residual stream (B, T, {D})", **muted)
    total = f"{style.format_count(sum(size.values()))} parameters each"
    say(ax, 0.14, -3.92, f"to the next of {model.n_layer} layers, {total}", **muted)
    for i, (name, part, weight, parameters, output) in enumerate(boxes):
        x, y = 0.75 + 1.84 * (i % 4), -2.35 * (i // 4)
        color = plots.PART_COLORS[part] if part else "#AEB5C0"
        face = style.tint(color, 0.22) if part else style.PAPER
        tile(ax, x + 0.75, y, 1.5, 0.96, face, edgecolor=color, linewidth=1.1, zorder=3)
        say(ax, x + 0.75, y + 0.26, name, weight="bold", zorder=4)
        text = f"{weight}\n{style.format_count(parameters)}" if part else weight
        say(ax, x + 0.75, y - 0.14, text, 8, linespacing=1.4, zorder=4)
        say(ax, x + 0.75, y - 0.56, f"(B, T, {output})", 7.5, va="top", color=style.MUTED)
        arrow(ax, (x - 0.34 if i % 4 else 0, y), (x, y), width=1.1, zorder=1)
    for name, y, count in (("attention", 0, size["qkv"] + size["attention_out"]), ("MLP", -2.35, size["mlp"])):
        words = f"{name}: {style.format_count(count)} parameters"
        say(ax, 2.59, y + 0.6, words, ha="left", va="bottom", weight="bold")
        ax.plot([right - 0.3, right, right], [y, y, y - 1.1], color=style.INK, linewidth=1.1, zorder=1)
        arrow(ax, (right, y - 1.1), (0.15, y - 1.1), width=1.1, zorder=1)
        ax.add_patch(Circle((0, y - 1.1), 0.15, facecolor=style.PAPER, edgecolor=style.INK, linewidth=1.3, zorder=3))
        say(ax, 0, y - 1.1, "+", 10, zorder=4)
    view(ax, -0.25, right + 0.25, -4.1, 1.05)


def slices(ax, x, y, width, height, held, color):
    """A tensor cut into a slice for each rank, of which those in `held` are filled."""
    for i in held:
        each = height / RANKS
        box(ax, x, y + i * each, width, each, color, edgecolor=style.PAPER, linewidth=0.5, zorder=2)
    frame(ax, x, y, width, height, zorder=1)


def zero_stages():
    """A row for each stage, a box for each rank, as wide as a parameter's bytes and as high as the model."""
    whole = cost.zero_state_bytes(1, 0, dp=1)  # of a parameter in mixed precision with Adam: 2 + 2 + 12
    ax = style.new_axes(None, 7.2, 3.9)
    for stage in range(4):
        shared = cost.zero_state_bytes(1, stage, dp=RANKS)
        for rank in range(RANKS):
            x = 19.5 * rank
            for part, nbytes in whole.items():
                held = range(RANKS) if shared[part] == nbytes else [rank]
                slices(ax, x, 11 * stage, nbytes, 8, held, style.MEMORY_COLORS[part])
                x += nbytes
        say(ax, -1.5, 11 * stage + 4, f"stage {stage}", 9, ha="right")
        total = f"{sum(shared.values()):.3g} bytes\na parameter"
        say(ax, 19.5 * RANKS - 1.5, 11 * stage + 4, total, 9, ha="left")
    for rank in range(RANKS):
        say(ax, 19.5 * rank + 8, -0.8, f"rank {rank}", 9, va="bottom", color=style.MUTED)
    names = {f"{part}, {nbytes:g} bytes": style.MEMORY_COLORS[part] for part, nbytes in whole.items()}
    view(ax, -9, 19.5 * RANKS + 10, 42, -3, aspect="auto", names=names)


def fsdp_step(layers=3):
    """What rank 0 holds of each layer's weights (left half of a box) and gradients (right half), column by column."""
    order = [("forward", i) for i in range(layers)] + [("backward", i) for i in reversed(range(layers))]
    ax = style.new_axes(None, 7.5, 1.6 + 0.55 * layers)
    for column, (phase, at) in enumerate(order):
        x, back = 1.35 * column + (0.4 if phase == "backward" else 0), phase == "backward"
        for number in range(layers):
            y, everything = 1.2 * number, range(RANKS) if number == at else ()
            slices(ax, x, y, 0.5, 1, everything, "tab:orange")
            slices(ax, x, y, 0.5, 1, [0], WEIGHTS)
            done = ("backward", number) in order[:column]
            slices(ax, x + 0.5, y, 0.5, 1, (everything if back else ()) or ([0] if done else ()), GRADIENTS)
        frame(ax, x - 0.06, 1.2 * at - 0.06, 1.12, 1.12, style.INK, 1.4)
        words = "gather\ncompute\nreduce-scatter\nfree" if back else "gather\ncompute\nfree"
        say(ax, x + 0.5, 1.2 * layers + 0.05, words, 8, va="top")
        say(ax, x + 0.5, -0.15, f"{phase} {at}", va="bottom", color=style.MUTED)
    for number in range(layers):
        say(ax, -0.15, 1.2 * number + 0.5, f"layer {number}", 9, ha="right")
    names = {"parameters, its own": WEIGHTS, "parameters, borrowed": "tab:orange", "gradients": GRADIENTS}
    view(ax, -0.9, 1.35 * len(order) + 0.2, 1.2 * layers + 1.3, -0.5, aspect="auto", names=names)


def mlp_cut():
    """y = GELU(x A) B: A cut by columns, B by rows, in the colour of the rank that holds them; grey: every rank.

    f and g mark where ranks talk (Shoeybi et al. 2019, figure 3).
    """
    ax, color, wide, left = style.new_axes(None, 7.5, 2.9), AXES["tensor"], 4.0, 0.0
    tensors = {  # width, height, along which of them it is cut
        "x": (1.6, 1.3, None),
        "A, by columns": (wide, 1.6, 0),
        "hidden = GELU(x A)": (wide, 1.3, 0),
        "B, by rows": (1.6, wide, 1),
        "y": (1.6, 1.3, None),
    }
    talks = {"x": ("f", "forward nothing,\nbackward a sum"), "B, by rows": ("g", "forward a sum,\nbackward nothing")}
    for name, (width, height, cut) in tensors.items():
        top, size = (wide - height) / 2, [width, height]
        if cut is not None:
            size[cut] /= RANKS
        for rank in range(RANKS if cut is not None else 1):
            place = (left + rank * size[0] * (cut == 0), top + rank * size[1] * (cut == 1))
            face = style.FAINT if cut is None else style.RANK_COLORS[rank]
            box(ax, *place, *size, face, edgecolor=style.PAPER, linewidth=1)
        say(ax, left + width / 2, top - 0.15, name, 9, va="bottom")
        left += width + 1.1
        if name in talks:
            x, (letter, does) = left - 0.55, talks[name]
            arrow(ax, (x - 0.4, wide / 2), (x + 0.4, wide / 2), color=color, width=1.8)
            say(ax, x, wide / 2 - 0.2, letter, 12, va="bottom", style="italic", color=color)
            ax.plot([x, x], [wide / 2 + 0.15, 4.25], color=color, linewidth=0.8, linestyle=":")
            say(ax, x, 4.35, does, 8, va="top", linespacing=1.3, color=color)
    names = {f"rank {rank}": style.RANK_COLORS[rank] for rank in range(RANKS)} | {"every rank": style.FAINT}
    view(ax, -0.1, left - 1.0, wide + 1.3, -0.7, names=names)


def dispatch(choices=((0, 3), (5, 2), (4, 7), (6, 1))):
    """A token of each of four ranks, in the rank's colour: to its two experts, and both answers back.

    choices: the two experts of each rank's token; rank r holds experts 2 r and 2 r + 1.
    """
    ax, lines = style.new_axes(None, 7.5, 2.9), {"solid": 0, "dashed": 1}
    columns = {"token": 0, "expert": 4.2, "sum": 8.4}
    for rank, experts in enumerate(choices):
        color, y = style.RANK_COLORS[rank], 3 * (3 - rank)
        frame(ax, -1.1, y - 1.25, 10.7, 2.5, linewidth=0.8)
        say(ax, -1.3, y, f"rank {rank}", 9, ha="right")
        tile(ax, columns["token"], y, 1.5, 0.9, color, "token")
        tile(ax, columns["sum"], y, 1.5, 0.9, color, "sum")
        for look, at in lines.items():
            mine, there = 2 * rank + at, experts[at]
            of_mine = 3 * (3 - mine // 2) + 0.6 - 1.2 * (mine % 2)
            tile(ax, columns["expert"], of_mine, 1.7, 0.8, WEIGHTS, f"expert {mine}")
            of_there = 3 * (3 - there // 2) + 0.6 - 1.2 * (there % 2)
            way = {"color": color, "width": 1.4, "linestyle": look}
            arrow(ax, (0.8, y), (columns["expert"] - 0.9, of_there), **way)
            arrow(ax, (columns["expert"] + 0.9, of_there), (columns["sum"] - 0.8, y), **way)
    for x, word in ((2.1, "dispatch"), (6.3, "combine")):
        say(ax, x, 10.75, word, 10)
    view(ax, -2.6, 9.9, -1.5, 11.2, aspect="auto", names={"weights of an expert": WEIGHTS})


def number_formats():
    """The bits of each format, its largest and smallest normal number, and the step from 1 to the next number."""
    fields = {"sign": "#4A4F58", "exponent (range)": "#F0AF00", "fraction (precision)": "#0068B8", "unread": "#E9ECF0"}
    fp32, bf16, fp16 = (torch.finfo(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16))
    rows = {  # exponent, fraction and unread bits; tf32 has fp32's range, fp16's precision, and 32 bits in memory
        "fp32": (8, 23, 0, fp32.max, fp32.tiny, fp32.eps),
        "tf32": (8, 10, 13, (2 - fp16.eps) * 2.0**127, fp32.tiny, fp16.eps),
        "bf16": (8, 7, 0, bf16.max, bf16.tiny, bf16.eps),
        "fp16": (5, 10, 0, fp16.max, fp16.tiny, fp16.eps),
    }
    ax = style.new_axes(None, 7.5, 2.4)
    for row, (name, (*bits, largest, smallest, step)) in enumerate(rows.items()):
        x, y = 0, 1.5 * (3 - row)
        say(ax, -1, y + 0.5, name, 9, ha="right", weight="bold")
        for color, length in zip(fields.values(), (1, *bits), strict=True):
            for _ in range(length):
                box(ax, x + 0.07, y + 0.06, 0.86, 0.88, color)
                x += 1
        for place, value in zip((36.2, 42.2, 48.2), (largest, smallest, step), strict=True):
            mantissa, exponent = f"{value:.1e}".split("e")
            plain = f"{value:,.5g}" if value >= 1 else f"{value:.2g}"
            power = rf"{mantissa} × $10^{{{int(exponent)}}}$"
            say(ax, place, y + 0.5, plain if 1e-4 < value < 1e6 else power)
    for place, word in zip((36.2, 42.2, 48.2), ("largest", "smallest\nnormal", "step at 1"), strict=True):
        say(ax, place, 5.8, word, va="bottom", color=style.MUTED)
    view(ax, -4.2, 51, -0.2, 7.3, aspect="auto", names=fields)


def thread_blocks(rows=10, columns=14, block=4):
    """Blocks of threads over a matrix that they do not divide; beside it the threads of one block."""
    _, (whole, one) = plt.subplots(1, 2, figsize=(7.5, 3.3), layout="constrained", width_ratios=(16.5, 10.4))
    down, across = -(-rows // block), -(-columns // block)
    by, bx, ty, tx = down // 2, across // 2, block - 1, 1  # the block and the thread that are shown
    box(whole, 0, 0, across * block, down * block, style.PAPER, hatch="////", edgecolor=style.FAINT)
    box(whole, 0, 0, columns, rows, style.tint(DATA, 0.12))
    box(whole, bx * block, by * block, block, block, style.tint(DATA, 0.35))
    box(whole, bx * block + tx, by * block + ty, 1, 1, DATA)
    whole.hlines(range(1, rows), 0, columns, color=style.PAPER, linewidth=0.8)
    whole.vlines(range(1, columns), 0, rows, color=style.PAPER, linewidth=0.8)
    for y in range(down):
        say(whole, -0.3, (y + 0.5) * block, f"y {y}", 8, ha="right")
        for x in range(across):
            frame(whole, x * block, y * block, block, block, style.INK, 2 if (y, x) == (by, bx) else 0.8, zorder=3)
    for x in range(across):
        say(whole, (x + 0.5) * block, -0.6, f"block x {x}", 8)
    say(whole, columns / 2, down * block + 0.7, "hatched: threads without a number", 8, color=style.MUTED)
    view(whole, -2, across * block + 0.3, down * block + 1.2, -1.2)
    for thread in range(block**2):
        y, x = divmod(thread, block)
        color = style.tint(DATA, 1 if (y, x) == (ty, tx) else 0.35)
        box(one, x, y, 1, 1, color, f"{x}, {y}", edgecolor=style.PAPER, linewidth=0.8)
    say(one, block / 2, -0.35, f"threads x, y of block {bx}, {by}", 8)
    place = f"row {by}·{block} + {ty} = {by * block + ty}\ncolumn {bx}·{block} + {tx} = {bx * block + tx}"
    say(one, block / 2, block + 0.75, f"thread {tx}, {ty} computes\n{place}", 8)
    view(one, -0.2, block + 0.2, block + 1.6, -0.8)


def warp_reads(n=32):
    """What the 32 threads of a warp read of an n x n matrix of fp32: memory delivers pieces of 8 numbers, 32 bytes."""
    size, reads = n * n, {"along a row": range(32), "down a column": range(0, 32 * n, n)}
    _, axes = plt.subplots(2, 1, figsize=(7.5, 2.9), layout="constrained")
    for ax, (label, positions) in zip(axes, reads.items(), strict=True):
        touched = {position // 8 for position in positions}
        box(ax, 0, 0, size, 12, style.tint(style.MUTED, 0.12))
        for piece in touched:
            box(ax, piece * 8, 0, 8, 12, DATA, edgecolor=style.PAPER, linewidth=0.4)
        for thread, position in enumerate(positions):
            x = (thread + 0.5) * size / 32
            box(ax, x - 0.36 * size / 32, 62, 0.72 * size / 32, 12, style.INK)
            ax.plot([x, position + 0.5], [60, 13], color=style.INK, linewidth=0.7, alpha=0.7)
        wanted = 100 * len(positions) / (8 * len(touched))
        say(ax, 0, 82, f"{label}: {len(touched)} pieces, {wanted:.3g} % of their bytes wanted", ha="left", va="bottom")
        say(ax, -8, 68, "threads", 8, ha="right", color=style.MUTED)
        say(ax, -8, 6, "memory", 8, ha="right", color=style.MUTED)
        view(ax, -85, size + 2, -3, 100, aspect="auto")


def product_tiles(n=32, side=8):
    """C = A B: what the block that computes one tile of C reads of A and B, turn by turn; the second turn is filled."""
    ax, far, turns = style.new_axes(None, 5.6, 4.6), 1.16 * n, n // side  # far: where B and C begin
    y, x = far + (turns - 2) * side, far + turns // 2 * side  # of the tile that is computed
    for name, left, top, color in (("A", 0, far, DATA), ("B", far, 0, WEIGHTS), ("C", far, far, DATA)):
        box(ax, left, top, n, n, style.tint(color, 0.1), edgecolor=style.FAINT, linewidth=0.8)
        say(ax, left + n / 2, top - 0.05 * n, f"{name}  ({n} × {n})", color=style.MUTED)
    for turn in range(turns):
        for left, top, color in ((turn * side, y, DATA), (x, turn * side, WEIGHTS)):
            face = style.tint(color, 1 if turn == 1 else 0.35)
            box(ax, left, top, side, side, face, f"turn {turn}", 7.5, edgecolor=style.PAPER, linewidth=1.2)
    box(ax, x, y, side, side, DATA, "this\nblock", 7.5, edgecolor=style.INK, linewidth=2)
    words = "copy one tile of A and one of B\ninto shared memory,\nand read them there"
    say(ax, n / 2, n / 2, f"in each turn, {side} × {side} threads\n{words}", 9)
    view(ax, -0.02 * n, 2.18 * n, 2.18 * n, -0.12 * n)


def small_tape():
    """The tape of L = (x W + x) v on numbers of paper size, and the order in which backward() visits its operations."""
    ax = style.new_axes(None, 7.5, 2.6)
    leaves = {"x": (0, 2, "1  2"), "W": (0, 0, "1  2\n3  4"), "v": (5.2, 0, "2\n1")}
    results = {"x W": (2.6, 1, "7  10"), "x W + x": (5.2, 2, "8  12"), "L": (7.8, 1, "28")}
    edges = [("x", "x W"), ("W", "x W"), ("x W", "x W + x"), ("x", "x W + x"), ("x W + x", "L"), ("v", "L")]
    nodes, colors = leaves | results, {"a leaf": WEIGHTS, "made by an operation": DATA}
    for start, end in edges:
        arrow(ax, nodes[start][:2], nodes[end][:2], shrinkA=30, shrinkB=30)
    for name, (x, y, numbers) in nodes.items():
        tile(ax, x, y, 1.1, 0.84, colors["a leaf" if name in leaves else "made by an operation"], numbers)
        say(ax, x, y - 0.56, name, weight="bold")
    for turn, name in enumerate(reversed(results), 1):
        x, y, _ = results[name]
        say(ax, x + 0.05, y + 0.62, f"backward {turn}", color=style.MUTED)
    view(ax, -0.8, 8.6, -0.8, 2.9, names=colors)


def encoder_decoder():
    """T5: two stacks of layers; the encoder's output goes to the cross attention of every layer of the decoder."""
    ax = style.new_axes(None, 7.2, 2.9)
    parts = {"self-attention": WEIGHTS, "attention to the encoder's output": GRADIENTS, "MLP": DATA}
    ax.plot([8.75, 9, 9, 1.25], [0, 0, -1, -1], color=style.INK, linewidth=1.2)
    for y, name, reads in ((0, "encoder", "the text"), (-2, "decoder", "what is written so far")):
        say(ax, -1.6, y + 0.2, name, 9.5, weight="bold")
        say(ax, -1.6, y - 0.2, reads, 8, color=style.MUTED)
        for layer in range(3):
            x = 3.1 * layer
            frame(ax, x - 0.15, y - 0.5, 2.7, 1)
            tile(ax, x + 0.42, y, 0.8, 0.6, parts["self-attention"], "earlier" if y else "all")
            if y:
                tile(ax, x + 1.25, y, 0.7, 0.6, parts["attention to the encoder's output"], "cross")
                arrow(ax, (x + 1.25, -1), (x + 1.25, y + 0.3))
            tile(ax, x + 2.05, y, 0.7, 0.6, parts["MLP"], "MLP")
            arrow(ax, (x - 0.5, y), (x - 0.15, y))
    view(ax, -2.9, 9.6, -2.8, 0.8, names=parts)


def waits(steps=4, entries=12, sent=5, seed=2):
    """Radius on one rank: what each entry holds, and which entries are sent; at the last step the mask is full."""
    axes = plt.subplots(1, steps, figsize=(7.5, 2.2), sharey=True, layout="constrained")[1]
    numbers = torch.Generator().manual_seed(seed)
    mask = torch.randperm(entries, generator=numbers)[:sent]
    residual, names = torch.zeros(entries), {"sent, on all ranks": WEIGHTS, "waits": style.EVENT_COLORS["data"]}
    for step, ax in enumerate(axes):
        total = residual + torch.rand(entries, generator=numbers) + 0.2
        goes = torch.zeros(entries, dtype=torch.bool)
        goes[mask if step < steps - 1 else slice(None)] = True
        for entry in range(entries):
            color = WEIGHTS if goes[entry] else style.EVENT_COLORS["data"]
            box(ax, entry, 0, 0.8, total[entry].item(), color)
            if residual[entry]:  # this step's gradient stands on what has waited
                ax.plot([entry, entry + 0.8], [residual[entry].item()] * 2, color=style.PAPER, linewidth=1.2)
        residual = total.masked_fill(goes, 0)
        say(ax, entries / 2, -0.45, f"step {step + 1}" if step < steps - 1 else "step T: all", 9.5, color=style.MUTED)
        ax.set(xlim=(-0.5, entries + 0.3), ylim=(-0.8, 4))
        ax.set_axis_off()
    axes[0].figure.legend(handles=style.legend_handles(names, bars=True), loc="outside upper center", ncols=2)


def bamboo(lost=None):
    """Each rank holds its own stage and a copy of the next one's, which it computes with; a lost rank's is needed."""
    ax = plt.subplots(figsize=(7.5, 1.65), layout="constrained")[1]
    alive = [rank for rank in range(RANKS) if rank != lost]
    for rank in range(RANKS):
        x, there = 3 * rank, rank in alive
        line = {"edgecolor": style.MUTED, "linestyle": "-" if there else ":"}
        color = style.RANK_COLORS[rank] if there else style.PAPER
        tile(ax, x, 0, 1.8, 0.62, color, f"stage {rank}" if there else "lost", 9.5, **line)
        say(ax, x, 0.68, f"rank {rank}", 9.5, color=style.MUTED)
        if there and rank + 1 < RANKS:  # the copy, pale while it is only computed with
            of_next = style.RANK_COLORS[rank + 1]
            spare = of_next if rank + 1 == lost else style.tint(of_next, 0.3)
            tile(ax, x, -0.78, 1.8, 0.62, spare, f"copy of {rank + 1}", 9.5, edgecolor=of_next)
    for left, right in zip(alive, alive[1:]):  # noqa: B905
        y = -0.78 if right - left > 1 else 0
        ends = (3 * left + 0.95, y), (3 * right - 0.95, y / 2)
        arrow(ax, *(ends if lost is None else ends[::-1]))
    say(ax, 1.5, 0.3, "forward" if lost is None else "backward", 9)
    view(ax, -1.3, 3 * RANKS - 1.7, -1.2, 1)


def rounds():
    """Three replicas in time: a round of all, one of those that live, and one with the newcomer, which is healed."""
    ax = plt.subplots(figsize=(7.5, 2), layout="constrained")[1]
    spans = ((0, 3.4, (0, 1, 2)), (4, 7.6, (0, 2)), (8.2, 11.4, (0, 1, 2)))
    for number, (begin, end, members) in enumerate(spans, 1):
        shares = f"1/{len(members)} of the batch"
        for rank in members:
            box(ax, begin, 2 - rank, end - begin, 0.62, style.RANK_COLORS[rank], shares, 9.5)
        say(ax, (begin + end) / 2, 2.95, f"round {number}", 9.5, color=style.MUTED)
    for rank in range(3):
        say(ax, -0.2, 2.31 - rank, f"r{rank}", 9.5, ha="right", color=style.MUTED)
    say(ax, 3.48, 1.31, "kill -9", 9.5, ha="left")
    frame(ax, 4.9, 1, 2.4, 0.62, style.MUTED, linestyle=":")
    say(ax, 6.1, 1.31, "a new r1 starts", 9)
    say(ax, 7.38, 1.31, "door", 9, ha="left", color=style.MUTED)
    arrow(ax, (8.1, 2.1), (8.1, 1.5))
    say(ax, 8.1, -0.3, "r0 sends r1 weights, moments and step", 9)
    view(ax, -0.8, 11.5, -0.5, 3.2, aspect="auto")


def chunks(count=8, room=3):
    """Which chunks of weights a device has at each turn of a step, its second; a dot: the chunk has just come."""
    ax, here, turns = (
        plt.subplots(figsize=(7.5, 3.4), layout="constrained")[1],
        [],
        [*range(count), *range(count)[::-1]],
    )
    for turn, used in enumerate(turns * 2):
        came = used not in here
        here = [*(here if not came else here[-room + 1 :]), used]
        here = list(dict.fromkeys(reversed(here)))[::-1]  # the newest stands last
        if turn < len(turns):
            continue
        x = turn - len(turns) + (0.5 if turn >= 1.5 * len(turns) else 0)
        for chunk in range(count):
            color = WEIGHTS if chunk == used else BORROWED if chunk in here else style.PAPER
            box(ax, x, chunk, 0.86, 0.86, color, edgecolor=style.FAINT, linewidth=0.8)
        if came:
            ax.add_patch(Circle((x + 0.43, used + 0.43), 0.17, facecolor=style.PAPER, linewidth=0))
    for chunk in range(count):
        say(ax, -0.2, chunk + 0.43, f"chunk {chunk}", 9.5, ha="right")
    for half, name in enumerate(("forward", "backward")):
        say(ax, (count + 0.5) * half + count / 2, count + 0.15, name, 9.5, va="top", color=style.MUTED)
    view(ax, -2, 2 * count + 0.6, count + 0.7, -0.2, names={"in use": WEIGHTS, "on the device": BORROWED})


SIMPLE = (rendezvous, broadcast_rounds, zero_stages, fsdp_step, mlp_cut, number_formats, waits, bamboo, chunks)
SIMPLE += (rounds, dispatch, thread_blocks, warp_reads, product_tiles, small_tape, encoder_decoder)
DRAWINGS = {function.__name__: function for function in SIMPLE} | {
    "ring_reduce_scatter": partial(ring, 0),
    "ring_all_gather": partial(ring, 1),
    "field_map": partial(divided, *WAYS),
    "field_six": partial(divided, "ddp", "zero1", "fsdp", "tp", "pp", "3d"),
    "field_ddp": partial(divided, "ddp"),
    "field_fsdp_tp_pp": partial(divided, "fsdp", "tp", "pp"),
    "field_3d": partial(divided, "3d", order=COPIES),
    "bamboo_lost": partial(bamboo, lost=2),
    "ranks_8": partial(rank_grid, tp=2, pp=2, dp=2, per_node=4),
    "ranks_16": partial(rank_grid, tp=4, pp=2, dp=2, per_node=8),
    "node_frontier": partial(node, "frontier"),
    "node_perlmutter": partial(node, "perlmutter"),
    "layer": partial(layer, ModelConfig(n_layer=4, n_head=4, d_model=128, vocab_size=256, max_seq_len=128)),
    "layer_gpt2": partial(layer, model_of("gpt2")),
}


def main(names):
    plots.use_style()
    plt.rcParams.update({"svg.hashsalt": "aiscale", "svg.fonttype": "none"})  # the same bytes each time; text as text
    for name in names or DRAWINGS:
        DRAWINGS[name]()
        plt.savefig(Path(__file__).with_name(f"{name}.svg"), metadata={"Date": None, "Creator": None})
        plt.close()


if __name__ == "__main__":
    main(sys.argv[1:])
