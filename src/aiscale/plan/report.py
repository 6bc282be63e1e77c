"""The planner's page for a terminal: one layout in full, and the layouts beside it."""

from __future__ import annotations

from aiscale.plan.answer import Answer
from aiscale.plan.memory import CATEGORIES
from aiscale.plan.search import Found


def page(answer: Answer, title: str, tokens: float, found: Found | None = None) -> str:
    shape, layout, step = answer.shape, answer.layout, answer.step
    lines = [
        f"{title}: {shape.parameters / 1e9:.3g} B parameters, {shape.layers} layers of {shape.hidden}, "
        f"sequences of {shape.seq}, {layout.global_batch} a step",
        f"on {answer.nodes:g} node{'s' * (answer.nodes != 1)}, {layout.gpus} x {answer.platform.name}",
        "",
        f"layout     {layout.name()}",
        f"step       {step.total_s:.3g} s, {answer.tokens_per_s:,.0f} tokens/s a device, "
        f"{answer.tokens_per_s * layout.gpus:,.0f} in all",
        f"rate       {answer.tflops:.4g} TFLOP/s a device, MFU {100 * answer.mfu:.1f} %, HFU {100 * answer.hfu:.1f} %"
        + ("; the host's launches set the pace" if step.launch_bound else ""),
        f"memory     {answer.memory_gb:.1f} of {answer.capacity_gb:.1f} GB"
        + ("" if answer.fits else f": {answer.memory_gb - answer.capacity_gb:.1f} GB too much"),
        f"{tokens / 1e9:,.3g} B tokens: {answer.days(tokens):,.3g} days, {answer.node_hours(tokens):,.0f} node-hours",
        "",
        *_seconds(answer),
        "",
        *_memory(answer),
    ]
    if found is not None:
        lines += ["", *_others(found)]
    return "\n".join(lines)


def _seconds(answer: Answer) -> list[str]:
    step = answer.step
    parts = {
        "computation": step.compute_s - step.recompute_s,
        "recomputation": step.recompute_s,
        "bubble": step.bubble_s,
        **step.parts,
        "optimizer, fixed": step.optimizer_s,
    }
    lines = ["where the step goes"]
    for name, seconds in parts.items():
        share = seconds / step.total_s
        if share >= 0.0005:
            lines.append(f"  {name:24}{seconds:10.4g} s {100 * share:5.1f} %  {'#' * round(40 * share)}")
    return lines


def _memory(answer: Answer) -> list[str]:
    stages = answer.stages
    shown = sorted({0, max(range(len(stages)), key=lambda i: sum(stages[i].values())), len(stages) - 1})
    lines = ["GB by stage" + " " * 13 + "".join(f"{f'stage {i}':>10}" for i in shown)]
    for category in CATEGORIES:
        cells = [stages[i][category] / 1e9 for i in shown]
        if max(cells) >= 0.05:
            lines.append(f"  {category:22}" + "".join(f"{cell:10.1f}" for cell in cells))
    return lines


def _others(found: Found) -> list[str]:
    lines = [f"{found.tried} layouts: {len(found.ranked)} fit, {len(found.too_large)} do not"]
    for answer, reason in found.reasons():
        lines.append(f"  {answer.layout.name():62} {answer.step.total_s:8.3g} s  {reason}")
    for over, layout in found.too_large[:3]:
        lines.append(f"  {layout.name():62} does not fit: {over:.1f} GB too much")
    return lines
