"""`aiscale submit FILE`: checks a launcher and all it needs, says what it costs, and submits it.

It runs on the login node. Exit status: 0 when submitted (or, with --dry-run, when nothing is
wrong), 1 when something is, 2 on bad input.
"""

from __future__ import annotations

import argparse
import getpass
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from aiscale.errors import ConfigError
from aiscale.plan import cost
from aiscale.plan.config import Run
from aiscale.plan.machines import find_machine
from aiscale.site import limits
from aiscale.site.asked import Rules, ask
from aiscale.site.doctor import Finding
from aiscale.site.profiles import Site, find, here, names
from aiscale.site.sbatch import Launcher, Training

ASK_ABOVE = 50  #: node-hours
LIMIT_S = 180  #: for a program that asks a busy file system or Slurm
TOO_MANY_NODES = 256  #: these must not read one environment on a shared file system at once
MANY_NODES = 32  #: from here on an environment should be packed: it pays for tens of nodes [sbcast]

#: (words of Slurm's refusal, what helps), the first that fits
_REMEDIES = (
    (
        "accounting/QOS policy",
        "sacctmgr show qos format=name,maxwall,maxtrespu,maxsubmitpu gives the limits",
    ),
    (
        "account|association|qos",
        "sacctmgr show assoc user=$USER format=account,qos names your accounts and QOS",
    ),
    ("partition", "sinfo --summarize names the partitions, and how many nodes each has"),
    (
        "node|feature|constraint|cpu|gres|memory",
        "sinfo --format='%P %D %c %m %G %f' says what nodes there are",
    ),
    ("time limit", "scontrol show partition gives the longest (MaxTime)"),
    ("", "change what it names, in the file's #SBATCH lines or by --sbatch OPTIONS"),
)


def examine(job: Launcher, rules: Rules | None) -> Iterator[Finding]:
    yield from environment(job)
    if training := job.training():
        yield from layout(job, training)
        yield corpus(training)
        run = training.run
        yield space(job, run)
        yield from host_memory(job, run, rules)
        yield from steps(job, run)
    yield modules(job)
    yield slurm(job)
    yield from limits.examine(job, rules)


def environment(job: Launcher) -> Iterator[Finding]:
    where, script = job.setting("ENVIRONMENT"), job.setting("SCRIPT")
    python = Path(where.removesuffix(".tar.gz")) / "bin/python"
    build = (
        f"launchers/{job.site.name}/build_environment.sh PREFIX"
        if job.site.build.create
        else "build one at PREFIX"
    )
    remedy = f"{build}, then export AISCALE_ENVIRONMENT=PREFIX"
    if where == "container":
        yield Finding("environment", "ok", "a container, which Slurm checks")
    elif where.endswith(".tar.gz") and not Path(where).is_file():
        yield Finding(
            "environment",
            "wrong",
            f"{where} is not there",
            remedy.replace(" PREFIX,", " --pack PREFIX,"),
        )
    elif not python.exists():
        yield Finding("environment", "wrong", f"{where} has no bin/python", remedy)
    elif not script and (error := _failure([python, "-c", "import aiscale"])):
        yield Finding("environment", "wrong", f"{python} cannot import aiscale: {error}", remedy)
    elif job.can_unpack and job.nodes >= MANY_NODES and not where.endswith(".tar.gz"):
        packed = remedy.replace(" PREFIX,", " --pack PREFIX,") + ".tar.gz"
        text = f"{where}: {job.nodes} nodes read it at once, which is slow"
        state = "wrong" if job.nodes >= TOO_MANY_NODES else "warning"
        yield Finding("environment", state, text, packed)
    else:
        yield Finding("environment", "ok", where)
    if script and not Path(script).is_file():
        call = f"aiscale submit {job.path} YOUR_SCRIPT.py OPTIONS"
        yield Finding("script", "wrong", f"{script} is no file here", call)


def layout(job: Launcher, training: Training) -> Iterator[Finding]:
    """Whether the ranks of the job can share the work."""
    if reason := training.misfit(job.ranks):
        what, _, remedy = reason.partition(": ")
        yield Finding(
            "layout", "wrong", f"{job.ranks} ranks: {what}", f"{remedy}, or --sbatch '-N NODES'"
        )


def corpus(training: Training) -> Finding:
    """Whether the text is there, as `aiscale.train.data` wants it."""
    path = Path(training.args.text)
    if path.is_file() or (path / "manifest.json").is_file():
        return Finding("corpus", "ok", str(path))
    if path.is_dir():
        remedy = f"aiscale data prepare {shlex.quote(str(path))} --out FOLDER, and name that"
        return Finding("corpus", "wrong", f"{path} is no folder of tokens", remedy)
    remedy = "make it with `aiscale data prepare`, or export AISCALE_CORPUS=FILE"
    return Finding("corpus", "wrong", f"{path} does not exist", remedy)


def checkpoint_bytes(run: Run, ranks: int) -> float:
    """One checkpoint: weights and two moments in fp32, and what Radius keeps on every rank.

    In 16 bits Megatron-Core and DeepSpeed, but for its stage 3, also write the 16-bit weights.
    """
    parallel = run.parallel
    beside = parallel.strategy == "megatron" or (
        parallel.strategy == "zero" and parallel.zero_stage < 3
    )
    bytes_each = 14 if beside and run.loop.precision in ("bf16", "fp16") else 12
    size = float(bytes_each * cost.parameter_count(run.model))
    if run.compression.method == "radius":
        size += ranks * cost.radius_held(run)
    return size


def checkpoints(run: Run) -> tuple[int, int]:
    """(how many stay on the disk after the last step, how many are there at most)"""
    if 0 < run.loop.checkpoint_every < run.loop.steps or run.loop.checkpoint_minutes:
        # an old one goes when the new one is whole
        return (run.loop.keep_checkpoints, run.loop.keep_checkpoints + 1)
    # one that is stopped before its last step writes one
    return (int(run.loop.save_last), 1)


def space(job: Launcher, run: Run) -> Finding:
    runs = Path(job.setting("RUNS") or "runs")
    _, count = checkpoints(run)
    one = checkpoint_bytes(run, job.ranks)
    needed = f"{count} checkpoint{'s' * (count != 1)} of {size_of(one)} in {runs}"
    there = next(
        folder for folder in (runs.absolute(), *runs.absolute().parents) if folder.is_dir()
    )
    rooms = {"free": shutil.disk_usage(there).free, "left of your quota": _quota_left(there)}
    for name, room in rooms.items():
        if room is not None and room < count * one:
            remedy = "free some space, or export AISCALE_RUNS=FOLDER on a larger file system"
            return Finding("space", "wrong", f"{needed}, and {size_of(room)} are {name}", remedy)
    return Finding("space", "ok", needed)


def planned(run: Run, ranks: int, machine: str) -> dict[str, float]:
    """{tokens_per_s, step_s} by the planner; empty for an unknown machine, or a batch too large."""
    from aiscale.plan.answer import plan
    from aiscale.plan.hardware import platform_of
    from aiscale.plan.layout import layout_of, shape_of

    try:
        shape, layout = shape_of(run.model, run.loop.seq_len), layout_of(run, ranks)
        answer = plan(shape, layout, platform_of(find_machine(machine)))
    except ConfigError:
        return {}
    return {"tokens_per_s": answer.tokens_per_s, "step_s": answer.step.total_s}


def steps(job: Launcher, run: Run) -> Iterator[Finding]:
    """Whether the planner thinks that the jobs are long enough."""
    found = planned(run, job.ranks, _machine(job))
    if found and run.loop.steps:
        start_h = job.starts * limits.start_s(job.nodes) / 3600
        needed = run.loop.steps * found["step_s"] / 3600 + start_h
        have = job.hours * job.starts
        start = ", and the time to meet," if start_h else ""
        text = f"{run.loop.steps:,}{start} take {needed:.2g} h (planned) of the {have:.3g} h "
        text += "asked for"
        more = f"--chain {math.ceil(1.2 * needed / job.hours)}" if needed > have else ""
        yield Finding("steps", "warning" if more else "ok", text, more)


def _machine(job: Launcher) -> str:
    """The machine of the catalogue that the job asks for; empty if the profile names none."""
    kinds = {kind.constraint: kind.machine for kind in job.site.node.kinds}
    return kinds.get(job.options.get("constraint", "")) or job.site.machine


#: what helps a node whose ranks need too much, by when they need it
_LESS_ON_THE_HOST = {
    "drawing weights": "--stage 2, or fsdp.sbatch, whose ranks draw one tensor at a time; or fewer "
    "ranks a node, by --ntasks-per-node",
    "saving": "more nodes, which divide the states (megatron without --no-zero1, fsdp, zero); or "
    "fewer ranks a node, by --ntasks-per-node",
}


def host_memory(job: Launcher, run: Run, rules: Rules | None = None) -> Iterator[Finding]:
    """Whether a node's own memory, as Slurm says, or the catalogue where there is no Slurm, holds
    what the planner says that its ranks need there."""
    from aiscale.plan.layout import layout_of, shape_of
    from aiscale.plan.memory import host_bytes

    name = "host memory"
    if not job.place.node.gpus:
        text = "what ranks need on nodes without GPUs is unknown"
        yield Finding(name, "warning", text, "count 16 bytes a parameter, and activations")
        return
    try:
        each = host_bytes(shape_of(run.model, run.loop.seq_len), layout_of(run, job.ranks))
    except ConfigError:
        # `layout` says why, or the planner has no such shape.
        yield Finding(name, "warning", "unknown: this run cannot be planned", "watch it in the job")
        return
    when = max(each, key=each.get)
    ranks = min(job.ranks_per_node, job.ranks)
    needed = ranks * each[when]
    text = f"{ranks} ranks x {size_of(each[when])} {when} = {size_of(needed)} a node (planned)"
    machine = _machine(job)
    have_gb = find_machine(machine).node.host_gb if machine else None
    if rules:
        have_gb = rules.node_gb(job.options.get("constraint", ""))
    if have_gb is None:
        what = f"{text}, and the node's memory is unknown"
        remedy = "read the site's own figure, and give its machine node.host_gb"
        yield Finding(name, "warning", what, remedy)
    elif needed > have_gb * 1e9:
        yield Finding(name, "wrong", f"{text}, which has {have_gb:.4g} GB", _LESS_ON_THE_HOST[when])
    else:
        yield Finding(name, "ok", f"{text} of {have_gb:.4g} GB")


def _quota_left(folder: Path) -> float | None:
    """Bytes that a Lustre quota leaves this user; None: there is no quota, or nobody to ask."""
    if not shutil.which("lfs"):
        return None
    command = ["lfs", "quota", "-q", "-u", getpass.getuser(), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    # KiB: used, soft and hard limit
    numbers = [int(number) for number in re.findall(r"\s(\d+)\*?", done.stdout)[:3]]
    return max(0, min(filter(None, numbers[1:])) - numbers[0]) * 1024 if any(numbers[1:]) else None


def modules(job: Launcher) -> Finding:
    if job.site_sh and not job.site_sh.is_file():
        remedy = "copy it from the launcher's first folder, or export AISCALE_SITE_SH=FILE"
        return Finding("modules", "wrong", f"{job.site_sh} is not there", remedy)
    if error := _failure(
        ["bash", "-lc", 'type module && module load "$@"', "modules", *job.modules]
    ):
        remedy = "look for it by module spider, then edit the line `module load` of site.sh"
        return Finding("modules", "wrong", f"cannot be loaded: {error}", remedy)
    return Finding("modules", "ok", " ".join(job.modules) or "none")


def slurm(job: Launcher) -> Finding:
    """What sbatch says of it without submitting it."""
    error = _failure([*job.command[:1], "--test-only", *job.command[1:]])
    # sbatch's last words where it finds no slurm.conf, by DNS neither, and where nobody listens
    if re.search("configuration source|[Uu]nable to contact slurm controller", error):
        return Finding(
            "Slurm",
            "wrong",
            f"that of {job.site.title} does not answer here",
            "submit from a login node",
        )
    if not error:
        return Finding("Slurm", "ok", "accepts it")
    remedy = next(remedy for words, remedy in _REMEDIES if re.search(words, error, re.IGNORECASE))
    return Finding("Slurm", "wrong", f"refuses it: {error}", remedy)


def _failure(command: Sequence[str | Path]) -> str:
    """Why a program failed, in its own last words; empty if it did not."""
    try:
        done = subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, timeout=LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} is not here, or does not answer ({type(error).__name__})"
    last = "; ".join(done.stderr.strip().splitlines()[-3:]) or f"status {done.returncode}"
    return last if done.returncode else ""


def size_of(nbytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes / 1e6:,.0f} MB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--dry-run",
        action="store_true",
        help="only check, and print the command that would submit it",
    )
    add("--yes", action="store_true", help=f"submit also what may cost over {ASK_ABOVE} node-hours")
    add(
        "--chain",
        type=int,
        default=1,
        metavar="N",
        help="submit N jobs, each goes on where the one before stopped",
    )
    add("--sbatch", default="", metavar="OPTIONS", help="for sbatch, such as '-q debug -t 20'")
    add(
        "--site",
        metavar="NAME",
        help="whose rules hold (default: this machine's, or the file's folder)",
    )
    add("file", metavar="FILE", help="a launcher")
    add("args", nargs=argparse.REMAINDER, metavar="ARGS", help="for the launcher, behind its name")


def run(args: argparse.Namespace) -> int:
    dry, yes = args.dry_run or "--dry-run" in args.args, args.yes or "--yes" in args.args
    rest = [word for word in args.args if word not in ("--dry-run", "--yes")]
    path = Path(args.file)
    if not path.is_file():
        raise ConfigError(
            f"{path} is not a file: name a launcher, such as launchers/frontier/ddp.sbatch"
        )
    job = Launcher.read(
        path, _site(args.site, path), sbatch=args.sbatch, args=rest, chain=args.chain
    )
    wrong = []
    for finding in [*examine(job, ask())]:  # a bad setting ends it before a line is printed
        print(finding.line(), file=sys.stderr, flush=True)
        if finding.state == "wrong":
            wrong.append(finding.name)
    if wrong:
        print(f"not submitted: {', '.join(wrong)}", file=sys.stderr)
        return 1
    if dry:
        named = [f"AISCALE_SITE_SH={job.site_sh}"] if job.site_sh else []
        print(shlex.join(["env", *named, *job.command] if named else job.command))
        return 0
    if limits.node_hours(job) > ASK_ABOVE and not yes:
        most = f"{limits.node_hours(job):,.4g} node-hours, more than {ASK_ABOVE}"
        print(
            f"not submitted: up to {most}: if you mean it, aiscale submit --yes {path}",
            file=sys.stderr,
        )
        return 1
    if job.chain > 1:
        return _submit_chain(job)
    return subprocess.run(job.command, env=job.environ).returncode


def _submit_chain(job: Launcher) -> int:
    """Each job waits for the one before; chain.sh ends a chain whose run is finished or failed."""
    ids: list[str] = []
    for number in range(1, job.chain + 1):
        words = ["--parsable", *(f"--dependency=afterany:{last}" for last in ids[-1:])]
        env = {**job.environ, "AISCALE_CHAIN": ids[0] if ids else "first"}
        done = subprocess.run(
            ["sbatch", *words, *job.command[1:]], env=env, stdout=subprocess.PIPE, text=True
        )
        if done.returncode:
            print(
                f"sbatch refused job {number} of {job.chain}; submitted: {' '.join(ids) or 'none'}",
                file=sys.stderr,
            )
            return done.returncode
        ids.append(done.stdout.strip().partition(";")[0])
    print(*ids)
    return 0


def _site(name: str | None, path: Path) -> Site:
    folder = path.absolute().parent.name
    if place := find(name) if name else here() or (find(folder) if folder in names() else None):
        return place
    raise ConfigError(
        f"this site is unknown: set --site to {', '.join(names())} or your own .toml, "
        "before the file"
    )
