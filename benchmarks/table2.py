"""Table 2 of Radius' appendix in small: one experiment gives each row its time and its perplexity.

    python benchmarks/table2.py FOLDER                  # an hour and a half, alone on two cores
    python benchmarks/table2.py FOLDER --model gpt-c    # 10.8 million parameters: half a day
    python benchmarks/table2.py FOLDER --minutes 25     # begins nothing later; again, to go on
    python benchmarks/table2.py FOLDER --quick          # a test of the script: two rows, one seed

Four ranks, whose cards are slowed until a dense exchange takes the published share of a step. As
published, all rows send in fp32 after the backward pass, and the first fifth of Radius' steps is
dense. For each row the rate is searched by one process, which updates the weights as four ranks do,
up to rounding; where the best rate is the lowest or the highest tried, the search goes on there.
Writes FOLDER/table2.json after each run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from common import SHARE, machine_facts, text_of

from aiscale.errors import write_whole
from aiscale.measure.compare import compare
from aiscale.measure.distributed.link import FRAMING, LATENCY_S
from aiscale.plan import cost, published
from aiscale.train.evaluate import OF_THE_RUN
from aiscale.train.model import GPT
from aiscale.train.presets import shape_of
from aiscale.train.record import read_metrics, read_note

RANKS = 4
RATES = (1e-3, 2e-3, 4e-3)
FACTOR = 2  #: between two rates
MOST_RATES = 8  #: then the JSON shows that the best is at an edge
SEEDS = (0, 1, 2)  #: all for these rows, the first for the others
REPEATED = ("dense", "0.4 every 200")
#: Ranks of this machine, as `aiscale train --nproc` starts them.
LAUNCH = """
import sys
from aiscale.launch import launch
sys.exit(launch(int(sys.argv[1]), sys.argv[2:]))
"""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How long a model is trained, and how many steps lie between two checkpoints."""

    steps: int
    tuned: int
    part: int
    batch: int = 16


SIZES = {
    "1x32": Size(steps=10, tuned=5, part=5),
    "laptop": Size(steps=2000, tuned=1000, part=2000),
    "gpt-c": Size(steps=2000, tuned=1000, part=100, batch=8),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Settings of a published row; density None is the dense baseline."""

    density: float | None
    interval: int | None

    @property
    def name(self) -> str:
        return "dense" if self.density is None else f"{self.density:g} every {self.interval}"

    def words(self, steps: int) -> list[str]:
        if self.density is None:
            return ["aiscale.train.ddp", "--bucket-mb=4096"]
        radius = [f"--density={self.density}", f"--interval={self.interval}"]
        return ["aiscale.train.radius", *radius, f"--dense-until={steps // 5}", "--bucket-mb=4096"]


def published_rows() -> list[Row]:
    """Dense and density 0.4 first: they are the claim."""
    rows = []
    for row in published.table("radius_perlmutter"):
        if row["model"] == "GPT-2.0B":
            rows.append(Row(density=row["density_d"], interval=row["update_T"]))
    return sorted(rows, key=lambda row: row.name not in REPEATED)


class Experiment:
    """The runs in a folder. `deadline_s`: on the monotonic clock, after which none begins."""

    def __init__(self, folder: Path, model: str, deadline_s: float) -> None:
        self.folder, self.model, self.deadline_s = folder, model, deadline_s
        self.size = SIZES[model]
        self.text = text_of(folder)

    def options(self, steps: int, lr: float, seed: int) -> list[str]:
        size = self.size
        words = [f"--model={self.model}", f"--text={self.text}", "--length=128", "--held-out=0.1"]
        words += [f"--batch={size.batch}", "--weight-decay=0.1", "--beta2=0.99", f"--seed={seed}"]
        words += [f"--lr={lr}", f"--min-lr={lr / 10}", f"--warm-up={steps // 10}"]
        words += [f"--decay-steps={steps}", f"--evaluate-every={max(1, steps // 10)}"]
        return [*words, "--evaluate-batches=16", f"--save-every={size.part}"]

    def start(self, ranks: int, words: list[str], run: Path) -> None:
        command = [sys.executable, "-c", LAUNCH, str(ranks), *words, f"--save={run}"]
        with run.with_suffix(".log").open("a") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log)

    def train(self, row: Row, lr: float, seed: int, link_mbit_s: float) -> Path:
        """Trains a row on four ranks, part by part; raises TimeUp at the deadline."""
        steps = self.size.steps
        run = self.folder / f"{row.name.replace(' ', '-')}-{seed}"
        module, *own = row.words(steps)
        words = ["-m", "aiscale.measure.slowed", str(link_mbit_s), "-m", module, *own]
        words += ["--micro-batch=2", *self.options(steps, lr, seed)]
        for until in range(self.size.part, steps + 1, self.size.part):
            if done_steps(run) < until:
                self.check_time()
                self.start(RANKS, [*words, f"--steps={until}"], run)
        return run

    def val_ppl(self, row: Row, lr: float) -> float:
        """At the end of a short run of one process."""
        steps = self.size.tuned
        run = self.folder / f"rate-{row.name.replace(' ', '-')}-{lr:g}"
        if done_steps(run) < steps:
            self.check_time()
            words = ["-m", *row.words(steps), f"--micro-batch={self.size.batch}"]
            words += [*self.options(steps, lr, SEEDS[0]), f"--steps={steps}"]
            self.start(1, words, run)
        (found,) = compare([run])
        return found["val_ppl"][0]

    def search_rate(self, row: Row) -> dict[float, float]:
        """{rate: validation perplexity}; the best is neither the lowest nor the highest."""
        found = {lr: self.val_ppl(row, lr) for lr in RATES}
        while len(found) < MOST_RATES:
            best = min(found, key=found.get)
            if best == max(found):
                lr = best * FACTOR
            elif best == min(found):
                lr = best / FACTOR
            else:
                break
            found[lr] = self.val_ppl(row, lr)
        return found

    def slow_link(self) -> dict[str, float]:
        """The cards' rate, and the step from which it follows."""
        file = self.folder / "link.json"
        if not file.exists():
            run = self.folder / "fast"
            words = ["-m", "aiscale.train.ddp", "--bucket-mb=4096", "--micro-batch=2"]
            self.start(RANKS, [*words, *self.options(20, RATES[0], 0), "--steps=20"], run)
            step_s = statistics.median(line["seconds"] for line in read_metrics(run)[3:])
            weights = GPT(shape_of(self.model)).parameters()
            gradient_bytes = sum(weight.nbytes for weight in weights)
            messages, sent = cost.collective_terms("all_reduce", gradient_bytes, RANKS, "gloo")
            exchange_s = step_s * SHARE / (1 - SHARE)
            rate = 8e-6 * FRAMING * sent / (exchange_s - messages * LATENCY_S)
            about = {"mbit_s": rate, "step_s_without": step_s, "share": SHARE}
            write_whole(file, json.dumps(about))
        return json.loads(file.read_text())

    def check_time(self) -> None:
        if time.monotonic() > self.deadline_s:
            raise TimeUp

    def write(self, link: dict, rates: dict, runs: dict[Row, list[Path]]) -> None:
        ordered = sorted(runs, key=lambda row: row.name != "dense")
        folders = [run for row in ordered for run in runs[row]]
        result = {
            "machine": machine_facts(),
            "model": self.model,
            "size": vars(self.size),
            "ranks": RANKS,
            "link": link,
            "val_ppl_by_rate": rates,
            "compare": compare(folders),
            "tasks": {run.name: evaluated(run) for run in folders},
        }
        text = json.dumps(result, indent=1).replace(str(self.folder), "runs")
        write_whole(self.folder / "table2.json", text + "\n")


class TimeUp(Exception):
    """--minutes are over."""


def evaluated(run: Path) -> dict:
    """Results on hundreds of items of the text that was held out; kept beside the run."""
    file = run.with_suffix(".tasks.json")
    if not file.exists():
        command = [sys.executable, "-m", "aiscale", "evaluate", str(run), "--json"]
        tasks = ["--tasks", ",".join(OF_THE_RUN)]
        done = subprocess.run([*command, *tasks], check=True, stdout=subprocess.PIPE, text=True)
        write_whole(file, json.dumps(json.loads(done.stdout)["results"]))
    return json.loads(file.read_text())


def done_steps(run: Path) -> int:
    """Of a run that was not cut short."""
    note = read_note(run)
    if note is None or note["status"] != "finished":
        return 0
    return note["options"]["steps"]


def cells(quick: bool) -> list[tuple[Row, int]]:
    """(row, seed) of all runs, in their order."""
    rows = published_rows()
    repeated = [row for row in rows if row.name in REPEATED]
    if quick:
        return [(row, SEEDS[0]) for row in repeated]
    once = [(row, SEEDS[0]) for row in rows]
    return once + [(row, seed) for row in repeated for seed in SEEDS[1:]]


def perform(experiment: Experiment, quick: bool) -> None:
    link, rates, runs = experiment.slow_link(), {}, {}
    for row, seed in cells(quick):
        if row.name not in rates:
            rates[row.name] = experiment.search_rate(row)
        lr = min(rates[row.name], key=rates[row.name].get)
        run = experiment.train(row, lr, seed, link["mbit_s"])
        runs.setdefault(row, []).append(run)
        experiment.write(link, rates, runs)
        print(f"{run.name}: trained at {lr:g}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=SIZES, default="laptop")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    model = "1x32" if args.quick else args.model
    deadline_s = time.monotonic() + 60 * args.minutes
    try:
        perform(Experiment(args.folder.resolve(), model, deadline_s), args.quick)
    except TimeUp:
        print("time is up: start it again to go on")


if __name__ == "__main__":
    main()
