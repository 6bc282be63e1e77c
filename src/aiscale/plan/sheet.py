"""The sheet that `aiscale plan` prints: the answer, where the step goes, memory, other layouts."""

from __future__ import annotations

from aiscale.plan.answer import Answer
from aiscale.plan.memory import CATEGORIES
from aiscale.plan.search import Ranking


def page(answer: Answer, title: str, tokens: float, ranking: Ranking | None) -> str:
    shape, layout, step = answer.shape, answer.layout, answer.step
    days, node_hours = answer.days(tokens), answer.node_hours(tokens)
    kwh = answer.energy_kwh(tokens)

    def band(value: float, what: str = "") -> str:
        ends = (f"{x:,.0f}" if x > 100 else f"{x:.3g}" for x in answer.band(value, what))
        return "({} to {})".format(*ends)

    doubt = ": it may not fit" * (answer.band(answer.memory_gb, "memory")[1] > answer.capacity_gb)
    active = f" ({shape.active_parameters / 1e9:.3g} B active)" if shape.experts else ""
    lines = [
        f"{title}: {shape.parameters / 1e9:.3g} B parameters{active}, "
        f"{shape.layers} layers of {shape.hidden}, "
        f"sequences of {shape.seq}, {layout.global_batch} a step",
        f"on {answer.nodes:g} node{'s' * (answer.nodes != 1)}, "
        f"{layout.gpus} x {answer.platform.name}",
        "",
        f"layout     {layout.name()}",
        f"step       {step.total_s:.3g} s {band(step.total_s)}, "
        f"{answer.tokens_per_s:,.0f} tokens/s a device, "
        f"{answer.tokens_per_s * layout.gpus:,.0f} in all",
        f"rate       {answer.tflops:.4g} TFLOP/s a device, "
        f"MFU {100 * answer.mfu:.1f} %, HFU {100 * answer.hfu:.1f} %"
        + ("; the host's launches set the pace" if step.launch_bound else ""),
        f"memory     {answer.memory_gb:.1f} GB {band(answer.memory_gb, 'memory')} "
        f"of {answer.capacity_gb:.1f} GB"
        + (doubt if answer.fits else f": {answer.memory_gb - answer.capacity_gb:.1f} GB too much"),
        _host(answer),
        f"disk       {answer.checkpoint_gb:,.0f} GB a checkpoint",
        f"{tokens / 1e9:,.3g} B tokens: {days:,.3g} days {band(days)}, "
        f"{node_hours:,.0f} node-hours {band(node_hours)}"
        + ("" if kwh is None else f", at most {kwh:,.0f} kWh of the devices"),
        f"in brackets: 8 of 10 published runs of this kind ({answer.kind}) were measured between",
        *(f"note       {caution}" for caution in answer.cautions),
        "",
        *_seconds(answer),
        "",
        *_memory(answer),
    ]
    if ranking is not None:
        lines += ["", *_others(ranking)]
    return "\n".join(lines)


def _host(answer: Answer) -> str:
    needed = answer.host_gb
    line = "host       " + ", ".join(f"{gb:.1f} GB a node {when}" for when, gb in needed.items())
    if answer.fits_host is None:
        return f"{line}; the node's memory is unknown"
    over = max(needed.values()) - answer.host_capacity_gb
    too_much = "" if answer.fits_host else f": {over:.1f} GB too much"
    return f"{line}, of {answer.host_capacity_gb:g} GB{too_much}"


def _seconds(answer: Answer) -> list[str]:
    lines = ["where the step goes"]
    for name, seconds in answer.step.causes().items():
        share = seconds / answer.step.total_s
        if share >= 0.0005:
            lines.append(
                f"  {name:24}{seconds:10.4g} s {100 * share:5.1f} %  {'#' * round(40 * share)}"
            )
    return lines


def _memory(answer: Answer) -> list[str]:
    stages = answer.stages
    shown = sorted(
        {0, max(range(len(stages)), key=lambda i: sum(stages[i].values())), len(stages) - 1}
    )
    lines = ["GB by stage" + " " * 13 + "".join(f"{f'stage {i}':>10}" for i in shown)]
    for category in CATEGORIES:
        cells = [stages[i][category] / 1e9 for i in shown]
        if max(cells) >= 0.05:
            lines.append(f"  {category:22}" + "".join(f"{cell:10.1f}" for cell in cells))
    return lines


def _others(ranking: Ranking) -> list[str]:
    lines = [f"{ranking.tried} layouts: {len(ranking.ranked)} fit, {len(ranking.too_large)} do not"]
    for answer, reason in ranking.reasons():
        lines.append(f"  {answer.layout.name():62} {answer.step.total_s:8.3g} s  {reason}")
    for over, layout in ranking.too_large[:3]:
        lines.append(f"  {layout.name():62} does not fit: {over:.1f} GB too much")
    return lines
