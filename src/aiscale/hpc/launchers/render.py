"""Renders a lesson for a site: one self-contained sbatch file.

render(LESSONS["ddp"], site("frontier"))     # the text of launchers/frontier/ddp.sbatch
drift("launchers")                           # the files in launchers/ that differ from what would be rendered
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

import jinja2

from aiscale.config import remedy, require_writable
from aiscale.hpc.launchers.lessons import LESSONS, Lesson
from aiscale.hpc.sites import GpuKind, Site, SiteError, site

BUILD = "build_environment.sh"  #: makes the environment of a site
SHIPPED = ("frontier", "perlmutter")  #: the sites whose launchers are committed
_WIDTH = 120


def render_all(place: Site) -> dict[str, str]:
    """{name: text} of all files of a site: the launchers that fit it, and the script that builds their environment if
    the profile has one."""
    files = {f"{lesson.name}.sbatch": render(lesson, place) for lesson in LESSONS.values() if fits(lesson, place)}
    if place.build.create:
        files[BUILD] = _finish(_environment().get_template(BUILD + ".j2").render(site=place), place)
    return files


def render(lesson: Lesson, place: Site) -> str:
    """The launcher of a lesson at a site; raises SiteError if the site is too small for it."""
    nodes, kind = nodes_of(lesson, place), _kind(lesson, place)
    longest = place.scheduler.hours_for(nodes, place.partition, place.qos)
    if longest is None:
        raise SiteError(f"{lesson.name} needs {nodes} nodes of {place.name}, more than its partition or QOS allows")
    hours = min(lesson.hours, longest)
    text = (
        _environment()
        .get_template("body.sbatch.j2")
        .render(
            lesson=lesson,
            site=place,
            nodes=nodes,
            ranks=place.node.ranks_per_node,
            settings=lesson.layout(place.node.gpus),
            sbatch=_sbatch(lesson, place, nodes, kind, hours, longest),
            no_chain=[name for name, qos in place.scheduler.qos.items() if not qos.may_chain],
        )
    )
    return _finish(text, place)


def nodes_of(lesson: Lesson, place: Site) -> int:
    return -(-max(1, lesson.ranks) // place.node.ranks_per_node)


def _kind(lesson: Lesson, place: Site) -> GpuKind:
    """The kind of node whose GPUs have enough memory; raises SiteError."""
    kind = place.node.kind_for(lesson.gpu_memory_gb)
    if kind is None:
        raise SiteError(f"{lesson.name} needs GPUs of {lesson.gpu_memory_gb:g} GB, and {place.name} has none")
    return kind


def fits(lesson: Lesson, place: Site) -> bool:
    if place.node.kind_for(lesson.gpu_memory_gb) is None:
        return False
    return place.scheduler.hours_for(nodes_of(lesson, place), place.partition, place.qos) is not None


def _sbatch(
    lesson: Lesson, place: Site, nodes: int, kind: GpuKind, hours: float, longest: float
) -> list[tuple[str, str]]:
    """(option, comment) of every #SBATCH line."""
    rules, lines = place.scheduler, []
    lines.append((f"--account={rules.account_example}", f"EDIT: {rules.account_hint}"))
    lines.append((f"--job-name={lesson.name}", "also the name of the output file"))
    lines.append(
        (f"--time={_clock(hours)}", f"EDIT: here at most {_clock(longest)} on {nodes} node{'s' * (nodes > 1)}")
    )
    ranks = f"{nodes * place.node.ranks_per_node} ranks, one for each {place.node.gpu}"
    lines.append((f"--nodes={nodes}", ranks if lesson.ranks else ""))  # a notebook starts its own
    lines.append((f"--ntasks-per-node={place.node.ranks_per_node}", ""))
    if place.node.gpus:
        lines.append((f"--gpus-per-node={place.node.gpus}", ""))
    if place.partition or rules.default_partition:
        lines.append((f"--partition={place.partition or rules.default_partition}", ""))
    if place.qos:
        lines.append((f"--qos={place.qos}", f"the default is {rules.default_qos}" if rules.default_qos else ""))
    if kind.constraint:
        lines.append((f"--constraint={kind.constraint}", _why(kind.constraint, rules.features)))
    lines += [(option, why.strip()) for option, _, why in (line.partition("  # ") for line in place.sbatch)]
    lines.append(("--output=%x-%j.out", "in the folder from which this is submitted"))
    if lesson.work == "train":
        lines.append(
            (f"--signal=B:USR1@{lesson.signal_s}", f"to this script, {lesson.signal_s} s before the time is up")
        )
        lines.append(("--requeue", "after a node has failed, or another job had to go first"))
        lines.append(("--open-mode=append", "what comes after a requeue goes on in the same file"))
    if lesson.chain:
        lines.append(("--dependency=singleton", "one job of this name at a time: two would write the same folder"))
    return lines


def _why(constraint: str, features: Mapping[str, str]) -> str:
    return "; ".join(features[word] for word in re.split(r"[&|]", constraint))


def _clock(hours: float) -> str:
    minutes = round(hours * 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:00"


def _finish(text: str, place: Site) -> str:
    return _tidy(text) + sources_of(text, place)


def sources_of(text: str, place: Site) -> str:
    """The sources named in brackets in a file, as comments for its end."""
    named = {key for group in re.findall(r"\[([a-z0-9, ]+)\]", text) for key in group.split(", ")}
    lines = [f"#   [{key}] {where}" for key, where in place.sources.items() if key in named]
    return "\n".join(["", f"# Sources, as of {place.read}:", *lines, ""]) if lines else ""


def _tidy(text: str) -> str:
    """No trailing blanks, no two empty lines in a row."""
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n") + "\n"


def _comment(text: str) -> str:
    paragraph = " ".join(text.split())
    return textwrap.fill(paragraph, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _aligned(pairs: Iterable[tuple[str, str]], lead: str = "") -> str:
    """Lines of `lead` and a text each, with their comments in one column if they fit."""
    pairs = list(pairs)
    column = min(44, max(len(lead + text) for text, _ in pairs)) + 2
    return "\n".join(f"{lead + text:{column}}# {why}" if why else lead + text for text, why in pairs)


@functools.cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"comment": _comment, "aligned": _aligned}
    return made


def write(place: Site, out: str | Path) -> list[Path]:
    """Write the launchers of a site to `out`/NAME; returns the files."""
    folder, files = Path(out) / place.name, []
    require_writable(folder, "--out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in render_all(place).items():
            _replace(folder / name, text, 0o755 if name == BUILD else 0o644)
            files.append(folder / name)
    except OSError as error:
        raise SiteError(f"{folder} cannot be written ({error.strerror}): {remedy(error, '--out')}") from None
    return files


def _replace(file: Path, text: str, mode: int) -> None:
    """Write the whole file, or leave the one that is there."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.write_text(text)
        partial.chmod(mode)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def drift(out: str | Path, places: Iterable[Site] | None = None) -> list[str]:
    """One line for each file in `out` that differs from what would be rendered now."""
    problems = []
    for place in places or map(site, SHIPPED):
        folder, wanted = Path(out) / place.name, render_all(place)
        for name, text in wanted.items():
            path = folder / name
            if not path.exists():
                problems.append(f"{path} is missing")
            elif path.read_text() != text:
                problems.append(f"{path} differs from what its template and profile give")
        problems += [f"{path} has no lesson" for path in sorted(folder.glob("*.sbatch")) if path.name not in wanted]
    return problems
