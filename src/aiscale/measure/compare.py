"""The command `aiscale compare DENSE RUN ...`: quality and time of runs beside a baseline.

    aiscale compare runs/dense runs/radius        # a table; compare/index.html and compare.json
    aiscale compare runs/dense-* runs/radius-*    # runs that differ only in seeds are one row

The runs are folders of trainers, `aiscale train ... --save FOLDER`, with an evaluation of text held
out (`--held-out 0.1 --evaluate-every 100`). Runs on another number of ranks, or on another kind of
machine, are rows of their own.

The columns are those of table 2 in the artifact appendix of Radius (MLSys 2025), the curves those
of its figures 1 and 2. Time is that of the training steps: evaluations and checkpoints, which all
runs have alike, do not count.
"""

from __future__ import annotations

import argparse
import html
import io
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from aiscale.errors import ConfigError
from aiscale.train.record import read_metrics, read_note

DAY_S = 86_400
#: Options of a trainer that do not change what a step computes, or are compared in another way.
_NO_SETTINGS = "seed text save save_every save_minutes evaluate_every patience peak_tflops".split()
#: Options that runs must share: else their perplexities are of different things.
_SAME = ("model", "length", "held_out")
_HEAD = ["runs", "ranks", "seeds", "train perplexity", "validation perplexity"]
_HEAD += ["time", "speed-up", "time saved"]


def compare(folders: Sequence[str | Path]) -> list[dict]:
    """A row for each group of runs that differ in seeds alone, the first folder's the baseline.

    A row has `runs`, `ranks`, `seeds` (how many different ones), `settings` (those that differ from
    the baseline's, and ranks and machine if they do), and (mean, lowest, highest) over its runs of
    train_ppl, val_ppl, days, speedup (baseline's time over its own, minus 1), time_saved (1 minus
    its own time over the baseline's). Its curves, [(step, mean, lowest, highest)], are loss and
    loss_error in nats, and val_ppl_curve. The loss error is the baseline's loss, of the same seed
    if it has that, minus its own. Raises ConfigError if a run has not finished, or has another
    text, model or number of tokens than the first.
    """
    runs = [_read(Path(folder)) for folder in folders]
    groups: dict[str, list[dict]] = {}
    for run in runs:
        for name, value in run["same"].items():
            if value != (first := runs[0]["same"][name]):
                raise ConfigError(
                    f"{run['path']} has {name} {value}, {runs[0]['path']} has {first}: "
                    "compare like runs"
                )
        groups.setdefault(json.dumps(run["settings"]), []).append(run)
    baseline, *_ = groups.values()
    days, settings = fmean(run["days"] for run in baseline), baseline[0]["settings"]
    mean_loss = {step: fmean(run["loss"][step] for run in baseline) for step in baseline[0]["loss"]}
    by_seed = {run["seed"]: run["loss"] for run in baseline}

    def loss_error(run: dict) -> dict[int, float]:
        loss = by_seed.get(run["seed"], mean_loss)
        return {step: loss[step] - value for step, value in run["loss"].items() if step in loss}

    def row(group: list[dict]) -> dict:
        """Of the runs with the same settings."""
        return {
            "runs": [str(run["path"]) for run in group],
            "ranks": group[0]["settings"]["ranks"],
            "seeds": len({run["seed"] for run in group}),
            "settings": _other(group[0]["settings"], settings),
            "train_ppl": _spread(math.exp(run["loss"][max(run["loss"])]) for run in group),
            "val_ppl": _spread(run["val_ppl"][max(run["val_ppl"])] for run in group),
            "days": _spread(run["days"] for run in group),
            "speedup": _spread(days / run["days"] - 1 for run in group),
            "time_saved": _spread(1 - run["days"] / days for run in group),
            "loss": _curve([run["loss"] for run in group]),
            "loss_error": _curve([loss_error(run) for run in group]),
            "val_ppl_curve": _curve([run["val_ppl"] for run in group]),
        }

    return [row(group) for group in groups.values()]


def _read(path: Path) -> dict:
    """What is compared of a run. Raises ConfigError if it has not finished."""
    note = _note_of(path)
    options, train, evals = note["options"], read_metrics(path), read_metrics(path, "eval")
    if note["status"] != "finished":
        done = f"{train[-1]['step'] + 1 if train else 0:,} of {options['steps']:,}"
        what = f"{path} is at step {done}, and {note['status']}"
        raise ConfigError(f"{what}: let it finish first (start it again)")
    if not evals:
        remedy = "train with --held-out 0.1 --evaluate-every 100"
        raise ConfigError(f"{path} has no evaluation, so no validation perplexity: {remedy}")
    window = max(1, len(train) // 100)  # losses of single steps scatter
    loss = {}
    for end in range(len(train), window - 1, -window):
        part = train[end - window : end]
        loss[part[-1]["step"] + 1] = fmean(line["loss"] for line in part)
    same = {name: options[name] for name in _SAME}
    same["tokens"] = options["steps"] * options["batch"] * options["length"]
    same["sequences in an evaluation"] = options["batch"] * options["evaluate_batches"]
    same["text with sha256"] = note["text_sha256"][:8]
    settings = {"trainer": note["trainer"]}
    settings |= {name: value for name, value in options.items() if name not in _NO_SETTINGS}
    return {
        "path": path,
        "same": same,
        "settings": settings | _place(note),
        "seed": options["seed"],
        "days": sum(line["seconds"] for line in train) / DAY_S,
        "loss": dict(sorted(loss.items())),
        "val_ppl": {line["step"] + 1: math.exp(line["loss"]) for line in evals},
    }


def _other(settings: dict, baseline: dict) -> dict:
    """The settings that differ from the baseline's; another trainer has options of its own."""
    return {name: value for name, value in settings.items() if value != baseline.get(name)}


def _note_of(path: Path) -> dict:
    try:
        note = read_note(path)
    except (OSError, ValueError):
        note = None
    if note is None:
        raise ConfigError(f"{path} is no run folder: it has no readable run.json")
    if "options" not in note:
        why = "holds a run of an earlier aiscale, whose record says other things"
        raise ConfigError(f"{path} {why}: train it again")
    return note


def _place(note: dict) -> dict:
    """Where a run ran, as far as its seconds depend on it. Names of hosts do not count: the nodes
    of a cluster are alike."""
    place = {"ranks": note["world_size"], "nodes": note.get("nodes", "unknown")}
    for key in ("processor", "cores", "threads_per_rank", "device"):
        place[key] = note["machine"].get(key, "unknown")
    return place


def _spread(values: Iterable[float]) -> tuple[float, float, float]:
    values = list(values)
    return fmean(values), min(values), max(values)


def _curve(runs: Sequence[dict[int, float]]) -> list[tuple[float, ...]]:
    """[(step, mean, lowest, highest)] of {step: value} of each seed, at the steps that all have."""
    return [
        (step, *_spread(run[step] for run in runs))
        for step in sorted(set.intersection(*map(set, runs)))
    ]


def table(rows: Sequence[dict]) -> list[list[str]]:
    """Head and rows as text; with several runs the range stands behind the mean."""
    from aiscale.measure.plots import format_seconds

    def cell(spread: Sequence[float], form) -> str:
        mean, low, high = map(form, spread)
        return mean if low == high else f"{mean} ({low} to {high})"

    lines = [_HEAD]
    for row in rows:
        gains = [
            cell(row[name], "{:+.1%}".format) if row is not rows[0] else ""
            for name in ("speedup", "time_saved")
        ]
        perplexities = [cell(row[name], "{:.2f}".format) for name in ("train_ppl", "val_ppl")]
        days = cell(row["days"], lambda days: format_seconds(days * DAY_S))
        lines.append([_name(row), str(row["ranks"]), _seeds(row), *perplexities, days, *gains])
    return lines


def _seeds(row: dict) -> str:
    """The number of different seeds; with that of runs, where some repeat a seed."""
    n_runs = len(row["runs"])
    return str(row["seeds"]) if row["seeds"] == n_runs else f"{row['seeds']} ({n_runs} runs)"


def differences(rows: Sequence[dict]) -> list[str]:
    """A line for each row but the baseline: its name, and what it has otherwise."""
    lines = []
    for row in rows[1:]:
        settings = [f"{key}={value}" for key, value in row["settings"].items()]
        lines.append(f"{_name(row)}: {', '.join(settings)}")
    return lines


def _name(row: dict) -> str:
    first, *others = (Path(run).name for run in row["runs"])
    return f"{first}, ..., {others[-1]}" if others else first


def figure(rows: Sequence[dict]):
    """Training loss, loss error and validation perplexity over steps: a matplotlib figure."""
    import matplotlib.pyplot as plt

    from aiscale.measure.plots import style

    style.use_style()
    figure, axes = plt.subplots(3, 1, figsize=(7.5, 7.6), sharex=True, layout="constrained")
    colors = style.series_colors([_name(row) for row in rows])
    for ax, curve in zip(axes, ("loss", "loss_error", "val_ppl_curve"), strict=True):
        for row, color in zip(rows, colors.values(), strict=True):
            if curve == "loss_error" and row is rows[0]:
                ax.axhline(0, color=color, linewidth=1.6)
                continue
            steps, means, lows, highs = zip(*row[curve], strict=True)
            ax.plot(
                steps,
                means,
                "o-" if len(steps) < 20 else "-",
                color=color,
                linewidth=1.6,
                markersize=4,
            )
            ax.fill_between(steps, lows, highs, color=color, alpha=0.2, linewidth=0)
    for ax, label in zip(
        axes,
        ("training loss (nats)", "baseline minus run (nats)", "validation perplexity"),
        strict=True,
    ):
        ax.set_ylabel(label)
    axes[2].set_xlabel("optimizer step")
    style.legend_above(axes[0], style.legend_handles(colors))
    return figure


def page(rows: Sequence[dict]) -> str:
    """An HTML page without links to other files: the table, what differs, the curves."""
    svg = io.StringIO()
    figure(rows).savefig(svg, format="svg")
    head, *body = ([html.escape(cell) for cell in line] for line in table(rows))
    differs = [f"<li>{html.escape(line)}</li>" for line in differences(rows)]
    return f"""<!doctype html><meta charset="utf-8"><title>Runs compared</title>
<style>body {{ font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }}
table {{ border-collapse: collapse }}
th, td {{ padding: 0.3em 0.8em; border-bottom: 1px solid #ccc; text-align: left }}
svg {{ max-width: 100%; height: auto }}</style>
<h1>Runs compared</h1>
<table><tr>{"".join(f"<th>{cell}</th>" for cell in head)}</tr>
{"".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in body)}</table>
<p>The first row is the baseline. Speed-up is its time over the run's, minus 1; time saved is 1
minus the run's time over its own. Time is that of the training steps. Ranges of several runs stand
in brackets, and are shades below.</p>
<p>What differs from the baseline:</p><ul>{"".join(differs)}</ul>
{svg.getvalue()[svg.getvalue().index("<svg") :]}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, the baseline first")
    parser.add_argument(
        "--out", default="compare", metavar="DIR", help="where the page goes (default: compare)"
    )


def run(args: argparse.Namespace) -> None:
    rows, out = compare(args.runs), Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "compare.json").write_text(json.dumps(rows, indent=1) + "\n")
    (out / "index.html").write_text(page(rows))
    lines = table(rows)
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
    for line in lines:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )
    if len(rows) > 1:
        print("what differs from the baseline:", *differences(rows), sep="\n")
    print(f"curves: {out / 'index.html'}")
