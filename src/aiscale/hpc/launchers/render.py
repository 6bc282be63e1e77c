"""Renders a lesson for a site: one self-contained sbatch file."""

from __future__ import annotations

import argparse
import functools
import math
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jinja2

from aiscale.config import ConfigError, Run, require_writable, write_whole
from aiscale.hpc.launchers.lessons import LESSONS, Lesson
from aiscale.hpc.sites import GpuKind, Site, SiteError, find, names, site
from aiscale.hpc.submit import checkpoint_bytes, checkpoints, size_of
from aiscale.machines import find_machine
from aiscale.plan.answer import plan
from aiscale.plan.hardware import platform_of
from aiscale.plan.layout import layout_of, shape_of
from aiscale.recipes import recipe

BUILD = "build_environment.sh"  #: makes the environment of a site
SHIPPED = ("frontier", "perlmutter")  #: the sites whose launchers are committed


def render_all(place: Site) -> dict[str, str]:
    """{name: text} of the launchers that fit a site, and of the script that builds their environment."""
    files = {f"{lesson.name}.sbatch": render(lesson, place) for lesson in LESSONS.values() if fits(lesson, place)}
    if place.build.create:
        files[BUILD] = _finish(templates().get_template(BUILD + ".j2").render(site=place), place)
    return files


def render(lesson: Lesson, place: Site) -> str:
    """The launcher of a lesson at a site; raises SiteError if the site is too small for it."""
    if lesson.on_cpus and place.cpus.node.ranks:
        place = place.on_cpus().part(lesson.on_cpus)
    job = _Job.of(lesson, place)
    edits, directives = _directives(job)
    body = templates().get_template("body.sbatch.j2")
    text = body.render(
        lesson=lesson,
        site=place,
        ranks=place.node.ranks_per_node,
        settings=lesson.layout(place.node.gpus),
        whole=recipe(lesson.recipe) if lesson.recipe else None,
        run=job.run() if lesson.work == "train" else None,
        head=head(job),
        edits=edits,
        directives=directives,
    )
    return _finish(text, place)


@dataclass(frozen=True)
class _Job:
    """What a launcher asks for."""

    lesson: Lesson
    place: Site
    nodes: int
    kind: GpuKind
    hours: float
    longest: float  #: hours that the site allows
    partition: str

    @classmethod
    def of(cls, lesson: Lesson, place: Site) -> _Job:
        nodes, rules = -(-max(1, lesson.ranks) // place.node.ranks_per_node), place.scheduler
        kind = next((kind for kind in place.node.kinds if kind.memory_gb >= lesson.gpu_memory_gb), None)
        if kind is None:
            raise SiteError(f"{lesson.name} needs GPUs of {lesson.gpu_memory_gb:g} GB, and {place.name} has none")
        partition = place.partition or rules.default_partition
        choices = [partition, *rules.partitions] if lesson.takes_days else [partition]  # the one with the longest time
        allowed = {name: rules.hours_for(nodes, name, place.qos) or 0.0 for name in choices}
        partition = max(allowed, key=lambda name: min(allowed[name], lesson.hours))
        if not allowed[partition]:
            raise SiteError(f"{lesson.name} needs {nodes} nodes of {place.name}, more than its partition or QOS allows")
        hours = min(lesson.hours, allowed[partition])
        return cls(lesson, place, nodes, kind, hours, allowed[partition], partition)

    @property
    def ranks(self) -> int:
        return self.nodes * self.place.node.ranks_per_node

    def run(self) -> Run:
        """The run that it trains, as the file stands."""
        lesson, settings = self.lesson, [setting for setting, _ in self.lesson.layout(self.place.node.gpus)]
        if lesson.steps:  # the recipe's warm-up may be longer than the lesson
            settings += [f"loop.steps={lesson.steps}", f"optimizer.warmup_steps={max(1, lesson.steps // 10)}"]
        return recipe(lesson.recipe).override(*settings)

    def price(self) -> str:
        """The most that it costs, in words."""
        rules, spent = self.place.scheduler, self.nodes * self.hours
        charged = rules.charge(self.nodes, self.hours, self.place.qos)
        unit = rules.charge_unit.removesuffix("s") if charged == 1 else rules.charge_unit
        same = f"{charged:,.4g} {unit}"
        return same if spent == charged else f"{spent:,.4g} node-hours (charged: {same})"


def head(job: _Job) -> list[str]:
    """The comment at the top: what it does, how to submit it, and the most that it costs."""
    lesson, place, name = job.lesson, job.place, f"{job.lesson.name}.sbatch"
    size = f"{job.nodes} node{'s' * (job.nodes > 1)} x {job.hours:g} h"
    lines = [f"{lesson.title} on {place.title}. {lesson.about}"]
    price = f"Costs at most {size} = {job.price()}"
    if lesson.work == "train":
        calls = [(f"aiscale submit {name} --set name=NAME", "checks, then sbatch; the rest is for `aiscale train`")]
        lines.append(expected(job))
        price += "; CHAIN=1 sbatch --requeue may start it 6 times"
        if lesson.takes_days:
            price += ". For a first try: sbatch -t 30, --set loop.steps=50 --set optimizer.warmup_steps=5"
    else:
        calls = [(f"aiscale submit {name}", "checks, then sbatch")] if lesson.work != "engines" else []
        call, what = _CALLS[lesson.work]
        calls.append((call.format(ranks=job.ranks), what))
    lines.insert(0 if lesson.takes_days else len(lines), f"{price}.")
    lines.append(f"Submit from {place.scratch}.")
    width = max((len(words) for words, _ in calls if len(words) <= 56), default=0)
    shown = [f"  {words:{width}}  {what}" for words, what in calls]
    if lesson.variants:
        shown.append(f"To compare with others: sbatch -J NAME {name} --set name=NAME, and")
        shown += [
            f"  {' '.join(f'--set {word}' for word in words)}  ({what})" for what, words in lesson.variants.items()
        ]
    return [*lines, *shown]


def expected(job: _Job) -> str:
    """What the file does as it stands: speed and time by the planner, loss, and bytes that stay on the disk."""
    run, lesson = job.run(), job.lesson
    loss = f"loss from {math.log(run.model.vocab_size):.1f} = ln {run.model.vocab_size:,} "
    loss += f"to {math.log(lesson.perplexity):.2f} (published)" if lesson.perplexity else "down"
    speed, machine = "", job.kind.machine or job.place.machine
    with suppress(ConfigError):  # no such machine, or a batch that does not divide over its ranks
        shape, layout = shape_of(run.model, run.loop.seq_len), layout_of(run, job.ranks)
        answer = plan(shape, layout, platform_of(find_machine(machine)))
        minutes = run.loop.steps * answer.step.total_s / 60
        time = f"{_two(minutes)} min" if minutes < 100 else f"{_two(minutes / 60)} h"
        speed = f"{_two(answer.tokens_per_s)} tokens/s per GPU and {time} for {run.loop.steps:,} steps (planned); "
    nbytes = checkpoints(run)[0] * checkpoint_bytes(run, job.ranks)
    return f"Expect {speed}{loss}; {size_of(nbytes) + ' in RUNS' if nbytes else 'no checkpoint'}."


def _two(number: float) -> str:
    return f"{float(f'{number:.2g}'):,.10g}"


#: work -> (how to start it, what that does), beside `aiscale submit`
_CALLS = {
    "scaling": ("sbatch -N 16 scaling.sbatch", "on 1, 2, 4, 8 and 16 nodes; results in RUNS/scaling-JOBID.jsonl"),
    "study": ("sbatch study.sbatch grid-node", "sizes x strategies; or your own file; both resume"),
    "notebook": ("sbatch notebook.sbatch 07 -p n_steps=20", "what follows the name is for `aiscale notebooks`"),
    "your_own": ("sbatch your_own.sbatch train.py --epochs 3", "nothing of this kit is needed"),
    "engines": ('cluster.start({ranks}, engines="slurm")', "in a notebook submits this; by hand it ends at once"),
}


def fits(lesson: Lesson, place: Site) -> bool:
    if lesson.only not in ("", place.name):
        return False
    try:
        _Job.of(lesson, place)
    except SiteError:
        return False
    return True


def _directives(job: _Job) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(option, comment) of the #SBATCH lines to edit, and of the others."""
    lesson, place, nodes = job.lesson, job.place, job.nodes
    rules, ranks = place.scheduler, place.node.ranks_per_node
    edits = [(f"--account={rules.account_example}", rules.account_hint)]
    limit = f"{_clock(job.longest)} at most on {nodes} node{'s' * (nodes > 1)}" if job.longest < 1000 else ""
    edits.append((f"--time={_clock(job.hours)}", limit))
    lines = [(f"--job-name={lesson.name}", ""), ("--output=%x-%j.out", "in the folder from which this is submitted")]
    each = f", one for each {place.node.gpu}" if place.node.gpus else ""
    lines.append((f"--nodes={nodes}", f"{nodes * ranks} ranks{each}" if lesson.ranks else ""))
    lines.append((f"--ntasks-per-node={ranks}", ""))
    if place.node.gpus:
        lines.append((f"--gpus-per-node={place.node.gpus}", ""))
    if job.partition:
        lines.append((f"--partition={job.partition}", ""))
    if place.qos:
        lines.append((f"--qos={place.qos}", f"the default is {rules.default_qos}" if rules.default_qos else ""))
    if job.kind.constraint:
        words = re.split(r"[&|]", job.kind.constraint)
        lines.append((f"--constraint={job.kind.constraint}", "; ".join(rules.features[word] for word in words)))
    lines += [line.partition("  # ")[::2] for line in place.sbatch]
    if lesson.work == "train":
        why = f"{lesson.signal_s} s before the end the ranks save and stop"
        lines += [(f"--signal=USR1@{lesson.signal_s}", why), ("--no-requeue", "")]
        lines.append(("--open-mode=append", "a requeued job goes on in the same file"))
    if lesson.work in ("train", "scaling", "study"):
        lines.append(("--dependency=singleton", "two jobs of one name would write the same folder"))
    return edits, lines


def _clock(hours: float) -> str:
    minutes = round(hours * 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:00"


def _finish(text: str, place: Site) -> str:
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n") + "\n" + sources_of(text, place)


def sources_of(text: str, place: Site) -> str:
    """The sources named in brackets in a file, as comments for its end."""
    named = {key for group in re.findall(r"\[([a-z0-9, ]+)\]", text) for key in group.split(", ")}
    lines = [f"#   [{key}] {where}" for key, where in place.sources.items() if key in named]
    by = f"# Rendered by `aiscale launchers`; sources, read on {place.read}:"
    return "\n".join(["", by, *lines, ""]) if lines else ""


def _comment(text: str) -> str:
    paragraph = " ".join(text.split())
    return textwrap.fill(paragraph, 120, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _comment_lines(lines: Iterable[str]) -> str:
    return "\n".join(f"# {line}" if line[0] == " " else _comment(line) for line in lines)


def _aligned(pairs: Iterable[tuple[str, str]], lead: str = "") -> str:
    pairs = list(pairs)
    column = min(44, max(len(lead + text) for text, _ in pairs)) + 2
    return "\n".join(f"{lead + text:{column}}# {why}" if why else lead + text for text, why in pairs)


@functools.cache
def templates() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"comment": _comment, "comment_lines": _comment_lines, "aligned": _aligned, "quote": shlex.quote}
    return made


def write(place: Site, out: str | Path) -> list[Path]:
    """Write the launchers of a site to `out`/NAME; returns the files."""
    folder = Path(out) / place.name
    require_writable(folder, "--out")
    folder.mkdir(parents=True, exist_ok=True)
    mode = {".sh": 0o755, ".sbatch": 0o644}
    return [write_whole(folder / name, text, mode[Path(name).suffix]) for name, text in render_all(place).items()]


def drift(out: str | Path, places: Iterable[Site] | None = None) -> list[Path]:
    """The files in `out` that are missing, changed by hand, or of no lesson."""
    folders = {Path(out) / place.name: render_all(place) for place in places or map(site, SHIPPED)}
    expected = {folder / name: text for folder, files in folders.items() for name, text in files.items()}
    there = {path: path.read_text() for folder in folders for path in folder.glob("*.s*")}
    return sorted(path for path in expected.keys() | there.keys() if expected.get(path) != there.get(path))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, shipped = parser.add_argument, " and ".join(SHIPPED)
    add("--site", metavar="FILE", help=f"a .toml file of your own, or one of {', '.join(names())} (default: {shipped})")
    add("--out", default="launchers", metavar="DIR", help="where files go (default: launchers)")
    add("--check", action="store_true", help="write nothing; say what would change")


def run(args: argparse.Namespace) -> int:
    places = [find(args.site)] if args.site else [site(name) for name in SHIPPED]
    if args.check:
        wrong = drift(args.out, places)
        print(*wrong, sep="\n", end="\n" * bool(wrong))
        print(f"{args.out}: {len(wrong)} files differ from what `aiscale launchers` writes", file=sys.stderr)
        return int(bool(wrong))
    for place in places:
        print(*write(place, args.out), sep="\n")
    return 0
