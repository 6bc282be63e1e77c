"""What README, lesson 11 and the planner's page say of the errors, from the scores themselves."""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import median

from choices import groups
from runs import SOURCES, Run, runs
from scores import HALVES, STALL, WITHOUT_WAITS, Score, blind, is_stall, step_s

from aiscale.plan.stalls import MOST_WAIT_NODES, NODES, REPLICAS, place

FAR_PCT = 18


def lines(boards: dict[str, list[Score]], regrets: dict[str, dict[str, float]]) -> list[str]:
    """One headline without stalls and one with them, never one alone; then the choices."""
    said = [_counted(boards["left_out"])]
    for board, unseen in (
        ("left_out", "its own table"),
        ("program_left_out", "any run of its program"),
    ):
        said.append(_headline(boards[board], unseen))
    halves = boards["one_model_left_out"]
    return [*said, _halves(halves), _choices(regrets), _in_common(), _far(boards["left_out"])]


def _counted(board: list[Score]) -> str:
    *rows, whole = board
    stalled = [row for row in rows if row.stalls]
    sources = ", ".join(
        f"{row.stalls} of {row.timed:,} of {row.source} ({100 * row.stalls / row.timed:.0f} %)"
        for row in stalled
    )
    return (
        f"{whole.timed:,} of {whole.runs:,} published runs have a step time, and "
        f"{whole.timed - whole.stalls:,} are scored without stalls. {sources} stalled: they took "
        f"over {STALL} times what constants fitted to all tables predict."
    )


def _halves(board: list[Score]) -> str:
    """Each model of the large sweep, predicted by constants that saw its other model."""
    without = " and ".join(f"{row.step_median_pct:.1f} %" for row in board)
    every = " and ".join(f"{row.step_with_stalls_pct:.1f} %" for row in board)
    memory = " and ".join(f"{row.memory_median_pct:.1f} %" for row in board)
    return (
        f"Each of nanotron's two models predicted with the other: step time {without} off without "
        f"stalls, {every} with them; memory {memory}."
    )


def _in_common() -> str:
    """What the stalled runs of nanotron have in common: nodes, pipelines, dp, micro-batches."""
    timed = [run for run in runs("nanotron_sweep") if run.step_s]
    stalled = [run for run in timed if is_stall(run)]

    def share(wanted) -> str:
        return f"{100 * sum(map(wanted, stalled)) / sum(map(wanted, timed)):.0f} %"

    most = [run for run in stalled if run.layout.micro_batch <= 4]
    return (
        f"Of nanotron's runs on {MOST_WAIT_NODES} nodes {share(_on_most_nodes)} stalled, on 32 "
        f"{share(_on_32_nodes)}, on fewer {share(_on_few_nodes)}; of pipelines "
        f"{share(_is_pipeline)}, of others {share(_is_whole)}; of those with dp 32 or more "
        f"{share(_is_wide)}; {100 * len(most) / len(stalled):.0f} % have micro-batches of 4 or "
        f"fewer sequences. A stalled pipeline waits {_wait_s(stalled):.2f} s for each neighbour "
        "and micro-batch, whatever its work."
    )


def _nodes(run: Run) -> int:
    return run.layout.gpus // run.platform.gpus_per_node


def _on_most_nodes(run: Run) -> bool:
    return _nodes(run) >= MOST_WAIT_NODES


def _on_32_nodes(run: Run) -> bool:
    return _nodes(run) == 32


def _on_few_nodes(run: Run) -> bool:
    return _nodes(run) < 32


def _is_pipeline(run: Run) -> bool:
    return run.layout.pp > 1


def _is_whole(run: Run) -> bool:
    return run.layout.pp == 1


def _is_wide(run: Run) -> bool:
    return run.layout.dp >= 32


def _wait_s(stalled: list[Run]) -> float:
    """Median seconds beyond the prediction by neighbour and micro-batch, of stalled pipelines."""
    waits = [
        (run.step_s - step_s(run, WITHOUT_WAITS))
        / min(run.layout.pp - 1, 2)
        / run.layout.micro_batches
        for run in stalled
        if run.layout.pp > 1
    ]
    return median(waits)


def stall_rows() -> list[dict]:
    """For `aiscale.plan.stalls`: runs and stalls of nanotron by nodes, pipeline and dp."""
    counts: Counter = Counter()
    for run in runs("nanotron_sweep"):
        if run.step_s:
            where = place(run.layout, run.platform)
            counts[where, "runs"] += 1
            counts[where, "stalled"] += is_stall(run)
    rows = []
    for nodes in NODES:
        for pipeline in (False, True):
            for replicas in REPLICAS:
                where = nodes, pipeline, replicas
                if counts[where, "runs"]:
                    row = {"program": "nanotron", "nodes": nodes, "pipeline": pipeline}
                    row |= {"replicas": replicas, "runs": counts[where, "runs"]}
                    rows.append(row | {"stalled": counts[where, "stalled"]})
    return rows


def _headline(board: list[Score], unseen: str) -> str:
    *rows, whole = board
    steps = sorted(row.step_median_pct for row in rows)
    every = sorted(row.step_with_stalls_pct for row in rows)
    memory = sorted(row.memory_median_pct for row in rows if row.memory_runs)
    return (
        f"Each table predicted without {unseen}: step time {whole.step_median_pct:.1f} % off "
        f"in the median of {len(steps)} tables without stalls ({steps[0]:.1f} to {steps[-1]:.1f} "
        f"%), {whole.step_with_stalls_pct:.1f} % with them ({every[0]:.1f} to {every[-1]:.1f} %); "
        f"memory {whole.memory_median_pct:.1f} % in that of {len(memory)} "
        f"({memory[0]:.1f} to {memory[-1]:.1f} %)."
    )


def _choices(regrets: dict[str, dict[str, float]]) -> str:
    parts = []
    for source, row in regrets.items():
        stalled = f", {row['stalled']} of the others stalled" if row["stalled"] else ""
        parts.append(
            f"{row['right']} of {row['groups']} groups of {source} (worst {row['worst']:.2f} "
            f"times{stalled})"
        )
    return (
        "Regret, the chosen layout's seconds over those of the best measured one of its width, "
        "depth, devices and batch: within 10 % in " + ", ".join(parts) + "."
    )


def _far(board: list[Score]) -> str:
    far = [row for row in board[:-1] if row.step_median_pct > FAR_PCT]
    far.sort(key=lambda row: -row.step_median_pct)
    named = ", ".join(
        f"{row.source} {row.step_median_pct:.1f} % without stalls, "
        f"{row.step_with_stalls_pct:.1f} % with them"
        for row in far
    )
    return f"Without their own table these are more than {FAR_PCT} % off: {named or 'none'}."


def reasons() -> list[str]:
    """Why the tables that are far off are far off, from their own rows."""
    return [_forge(), *_chosen(), *_nanotron(), *_experts()]


def _forge() -> str:
    one, many = (run for run in runs("forge_frontier_throughput") if run.id.startswith("FORGE-M"))
    c = blind("forge_frontier_throughput")
    more = many.step_s - one.step_s
    nodes = many.layout.gpus / 8
    # both halves of tp, there and back, in 2 bytes
    gb = 2 * 2 * many.shape.parameters * (nodes - 1) / nodes / 1e9
    return (
        f"forge_frontier_throughput: FORGE-M takes {one.step_s:.1f} s on one node and "
        f"{many.step_s:.1f} s on {nodes:.0f}, with the same work on each GCD: {more:.1f} s more "
        f"(predicted {step_s(many, c) - step_s(one, c):.1f}), in which {gb:.0f} GB leave a node, "
        f"{gb / more:.0f} GB/s where its adapters carry 100."
    )


def _nanotron() -> list[str]:
    """By group: without any run of nanotron, and with its other model."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for half, model in HALVES.items():
        for run in runs("nanotron_sweep"):
            if run.step_s and run.model.startswith(model) and not is_stall(run):
                where = "tp in a node" if run.layout.tp <= 8 else "tp over nodes"
                tp = where if run.layout.tp > 1 else "tp 1"
                name = f"{tp}, {'a pipeline' if run.layout.pp > 1 else 'no pipeline'}"
                both = (step_s(run, blind(part)) / run.step_s for part in ("nanotron_sweep", half))
                groups[name].append(tuple(both))
    said = []
    for name, pairs in sorted(groups.items()):
        off = (
            100 * median(abs(ratio - 1) for ratio in ratios) for ratios in zip(*pairs, strict=True)
        )
        said.append(
            "nanotron_sweep, {}: {:.0f} % off without nanotron, "
            "{:.0f} % with its other model".format(name, *off)
        )
    return said


def _chosen() -> list[str]:
    """A choice prefers the layouts for which the formulas are too fast."""
    said = []
    for source in ("vtrain_dgx_a100", "bloom_176b_topology_sweep"):
        chosen, every = [], []
        for group in groups(source, blind(source)):
            ratios = [m / p for m, p in zip(group.measured_s, group.predicted_s, strict=True)]
            every += ratios
            chosen.append(ratios[group.layouts.index(group.planned)])
        said.append(
            f"{source}: the layouts that the planner chooses took {median(chosen):.2f} times what "
            f"it predicts, all of them {median(every):.2f} times"
        )
    return said


def _experts() -> list[str]:
    """By model: mixtures of experts, each table predicted without it."""
    groups: dict[str, list[float]] = defaultdict(list)
    for source in SOURCES:
        for run in runs(source):
            if run.shape.experts and run.step_s:
                groups[run.model].append(step_s(run, blind(source)) / run.step_s)
    said = []
    for model, ratios in sorted(groups.items()):
        off = 100 * median(abs(ratio - 1) for ratio in ratios)
        said.append(
            f"experts, {model}: {off:.0f} % off in {len(ratios)} runs without their table, "
            f"predicted {min(ratios):.2f} to {max(ratios):.2f} of the published time"
        )
    return said
