"""Renders a site's launchers: an sbatch file for each lesson, and site.sh, which all source.

render_all(site("frontier"))["site.sh"]
"""

from __future__ import annotations

import argparse
import dataclasses
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

from aiscale.errors import require_writable, write_whole
from aiscale.plan.config import Run
from aiscale.plan.machines import find_machine
from aiscale.plan.options import run_of
from aiscale.plan.presets import presets
from aiscale.site import limits
from aiscale.site.launchers.lessons import LESSONS, Lesson
from aiscale.site.profiles import GpuKind, Site, SiteError, find, names, site
from aiscale.site.submit import checkpoint_bytes, checkpoints, planned, size_of
from aiscale.train.options import options

LONG_H = 2  #: a longer job asks for the partition with the longest time
BUILD = "build_environment.sh"  #: makes the environment of a site
SHIPPED = ("frontier", "perlmutter")  #: the sites whose launchers are committed
_WHOLE_WORDS = {"break_on_hyphens": False, "break_long_words": False}
_OPTION = r"--[a-z0-9-]+"


def render_all(place: Site) -> dict[str, str]:
    """{name: text} of the launchers that fit a site, and of what builds their environment."""
    if place.pbs:
        return {
            "your_own.pbs": _finish(templates().get_template("your_own.pbs.j2").render(site=place))
        }
    files = {
        f"{lesson.name}.sbatch": render(lesson, place)
        for lesson in LESSONS.values()
        if fits(lesson, place)
    }
    files |= sourced(place)
    if place.build.create:
        files[BUILD] = _finish(templates().get_template(BUILD + ".j2").render(site=place))
    return files


def render(lesson: Lesson, place: Site) -> str:
    """The launcher of a lesson at a site; raises SiteError if the site is too small for it."""
    place = place_for(lesson, place)
    job = _Job.of(lesson, place)
    text = templates().get_template("body.sbatch.j2")
    return _finish(text.render(job=job, lesson=lesson, site=place, head=head(job)))


def sourced(place: Site) -> dict[str, str]:
    """{name: text} of what launchers source: site.sh, and what that sources for some jobs."""
    # As many GPUs as the job asked for, so that it serves jobs on a part of a node, too.
    srun = re.sub(r"--gpus-per-node=\d+", '--gpus-per-node="$SLURM_GPUS_PER_NODE"', place.srun)
    rules = place.scheduler
    unchained = [name for name, qos in rules.qos.items() if not qos.may_chain]
    unchained += [rules.qos_prefix + name for name in unchained if rules.qos_prefix]
    gpus = ' --gpus-per-node="$SLURM_GPUS_PER_NODE"' if place.node.gpus else ""
    values = {
        "site": place,
        "srun": srun,
        "gpus": gpus,
        "unchained": " ".join(unchained),
        "why": "README.md beside it" if place.name in SHIPPED else f"the profile {place.name}.toml",
    }
    files = ["site.sh", "nodes.sh", "chain.sh", *(["unpack.sh"] if place.shell.unpack else [])]
    return {name: _finish(templates().get_template(f"{name}.j2").render(values)) for name in files}


def place_for(lesson: Lesson, place: Site) -> Site:
    """The site, or the part of a node that the lesson asks for."""
    if lesson.on_cpus and place.cpus.node.ranks:
        return place.on_cpus().part(lesson.on_cpus)
    return (
        dataclasses.replace(place, qos=lesson.shared).part(lesson.ranks) if lesson.shared else place
    )


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
        nodes = lesson.nodes or -(-max(1, lesson.ranks) // place.node.ranks_per_node)
        rules = place.scheduler
        kind = next(
            (kind for kind in place.node.kinds if kind.memory_gb >= lesson.gpu_memory_gb), None
        )
        if kind is None:
            raise SiteError(
                f"{lesson.name} needs GPUs of {lesson.gpu_memory_gb:g} GB, "
                f"and {place.name} has none"
            )
        partition = place.partition or rules.default_partition
        takes_days = lesson.hours > LONG_H  # then in the partition with the longest time
        choices = [partition, *rules.partitions] if takes_days else [partition]
        allowed = {name: rules.hours_for(nodes, name, place.qos) or 0.0 for name in choices}
        partition = max(allowed, key=lambda name: min(allowed[name], lesson.hours))
        if not allowed[partition]:
            raise SiteError(
                f"{lesson.name} needs {nodes} nodes of {place.name}, "
                "more than its partition or QOS allows"
            )
        hours = min(lesson.hours, allowed[partition])
        return cls(lesson, place, nodes, kind, hours, allowed[partition], partition)

    @property
    def ranks(self) -> int:
        return self.nodes * self.place.node.ranks_per_node

    @property
    def steps(self) -> int:
        """Of a submission as the file stands."""
        return self.lesson.steps or self.lesson.training["steps"]

    @property
    def warm_up(self) -> int:
        """A tenth of a lesson's steps: what is published may be longer than the lesson."""
        return max(1, self.steps // 10) if self.lesson.steps else self.lesson.training["warm_up"]

    @property
    def settings(self) -> list[str]:
        """Options, as the lines of the file have them."""
        lesson, gpus = self.lesson, self.place.node.gpus
        length = presets()[lesson.model]["context"]
        shape = '--save "$RUNS/$SLURM_JOB_NAME" '
        batch = lesson.batch or lesson.training["batch"]
        shape += f"--model {lesson.model} --length {length} --batch {batch}"
        if peak := self.peak_tflops:
            shape += f" --peak-tflops {peak:g}"
        ours = " ".join([shape, *(options for options, _ in lesson.layout(gpus))])
        pairs = re.sub(r" (?!--)", "=", ours)  # textwrap must not part an option from its value
        wrapped = textwrap.wrap(pairs, 94, **_WHOLE_WORDS)
        return [line.replace("=", " ") for line in wrapped] + lesson.published(gpus)

    @property
    def reasons(self) -> list[str]:
        """Why options are as they are."""
        lesson, gpus = self.lesson, self.place.node.gpus
        lines = [*lesson.layout(gpus), *((line, "published") for line in lesson.published(gpus))]
        return [f"{', '.join(re.findall(_OPTION, line))}: {why}" for line, why in lines if why]

    @property
    def peak_tflops(self) -> float | None:
        """In bf16; None where the profile names no machine."""
        machine = self.kind.machine or self.place.machine
        if not machine:
            return None
        return find_machine(machine).node.accelerator.tflops.get("bf16")

    def run(self) -> Run:
        """What it trains, as the file stands, for the formulas."""
        words = " ".join([*self.settings, f"--steps {self.steps} --warm-up {self.warm_up}"]).split()
        return run_of(self.lesson.trainer, options(self.lesson.trainer).parse_args(words))

    def price(self) -> str:
        """The most that it costs, in words."""
        rules, spent = self.place.scheduler, self.nodes * self.hours
        charged = rules.charge(self.nodes, self.hours, self.place.qos)
        unit = rules.charge_unit.removesuffix("s") if charged == 1 else rules.charge_unit
        same = f"{charged:,.4g} {unit}"
        return same if spent == charged else f"{spent:,.4g} node-hours (charged: {same})"


def head(job: _Job) -> list[str]:
    """The comment at the top: what it does, its highest price, what to expect, how to submit it."""
    lesson, place, name = job.lesson, job.place, f"{job.lesson.name}.sbatch"
    size = f"{job.nodes} node{'s' * (job.nodes > 1)} x {job.hours:g} h"
    lines = [
        f"{lesson.title} on {place.title}. {lesson.about}",
        f"Costs at most {size} = {job.price()}.",
    ]
    if lesson.hours > LONG_H:
        lines.reverse()
        lines.append("A first try: sbatch -t 30, and --steps 50 --warm-up 5.")
    if lesson.work == "train":
        lines += expected(job)
    call = lesson.call or f"Submit: {place.submit} {name}."
    more = "launchers/" * (place.name not in SHIPPED)
    return [*lines, f"{call} More: {more}README.md"]


def expected(job: _Job) -> list[str]:
    """What the file does as it stands: planned speed and time, loss, and bytes left on the disk."""
    run, lesson = job.run(), job.lesson
    loss = f"loss from {math.log(run.model.vocab_size):.1f} "
    loss += f"to {math.log(lesson.perplexity):.2f} (published)" if lesson.perplexity else "down"
    speed = ""
    if found := planned(run, job.ranks, job.kind.machine or job.place.machine):
        minutes = run.loop.steps * found["step_s"] / 60
        time = f"{_two(minutes)} min" if minutes < 100 else f"{_two(minutes / 60)} h"
        speed = f"{_two(found['tokens_per_s'])} tokens/s a GPU, "
        speed += f"{time} for {run.loop.steps:,} steps (planned); "
        if minutes / 60 > job.hours:
            jobs = math.ceil(minutes / 60 / job.hours)
            whole = f"{_two(job.nodes * minutes / 60)} node-hours in a chain of {jobs}"
            speed += f"the whole training takes {whole}; "
    start = []
    if meet_s := limits.start_s(job.nodes):
        start = [
            f"Before that ranks meet, in {meet_s / 60:.0f} min or more ({limits.START_SOURCE})."
        ]
    one = checkpoint_bytes(run, job.ranks)
    kept = checkpoints(run)[0]
    held = size_of(kept * one) if kept else f"no checkpoint; {size_of(one)} if it is stopped"
    left = f"RUNS/{lesson.name} ({held}) "
    left += f"and {lesson.name}-JOBID.out"
    return [f"Expect {speed}{loss}.", *start, f"Leaves {left}."]


def _two(number: float) -> str:
    return f"{float(f'{number:.2g}'):,.10g}"


def fits(lesson: Lesson, place: Site) -> bool:
    with suppress(SiteError):
        return lesson.only in ("", place.name) and _Job.of(lesson, place).nodes > 0
    return False


def _finish(text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n") + "\n"


@functools.cache
def templates() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    options = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    made = jinja2.Environment(loader=loader, keep_trailing_newline=True, **options)
    marks = {"initial_indent": "# ", "subsequent_indent": "# "}
    made.filters["comment"] = functools.partial(textwrap.fill, width=100, **_WHOLE_WORDS, **marks)
    made.filters |= {
        "quote": shlex.quote,
        "clock": lambda h: "{:02}:{:02}:00".format(*divmod(round(h * 60), 60)),
    }
    return made


def write(place: Site, out: str | Path) -> list[Path]:
    """Write the launchers of a site to `out`/NAME; returns the files."""
    folder = Path(out) / place.name
    require_writable(folder, "--out")
    folder.mkdir(parents=True, exist_ok=True)
    return [
        write_whole(folder / name, text, 0o755 if name == BUILD else 0o644)
        for name, text in render_all(place).items()
    ]


def drift(out: str | Path, places: Iterable[Site] | None = None) -> list[Path]:
    """The files in `out` that are missing, changed by hand, or of no lesson."""
    folders = {Path(out) / place.name: render_all(place) for place in places or map(site, SHIPPED)}
    expected = {
        folder / name: text for folder, files in folders.items() for name, text in files.items()
    }
    there = {path: path.read_text() for folder in folders for path in folder.glob("*.s*")}
    return sorted(
        path for path in expected.keys() | there.keys() if expected.get(path) != there.get(path)
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, shipped = parser.add_argument, " and ".join(SHIPPED)
    add(
        "--site",
        metavar="FILE",
        help=f"a .toml file of your own, or one of {', '.join(names())} (default: {shipped})",
    )
    add("--out", default="launchers", metavar="DIR", help="where files go (default: launchers)")
    add("--check", action="store_true", help="write nothing; say what would change")


def run(args: argparse.Namespace) -> int:
    places = [find(args.site)] if args.site else [site(name) for name in SHIPPED]
    if args.check:
        wrong = drift(args.out, places)
        print(*wrong, sep="\n", end="\n" * bool(wrong))
        print(
            f"{args.out}: {len(wrong)} files differ from what `aiscale launchers` writes",
            file=sys.stderr,
        )
        return int(bool(wrong))
    for place in places:
        print(*write(place, args.out), sep="\n")
    return 0
