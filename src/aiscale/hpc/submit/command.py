"""The command `aiscale submit`: one line for each check, the price, then sbatch.

    aiscale submit launchers/frontier/ddp.sbatch --dry-run
    aiscale submit --sbatch "-q debug -t 20" launchers/frontier/ddp.sbatch --set loop.steps=20

Exit status: 0 when submitted (or, with --dry-run, when nothing is wrong), 1 when something is, 2 on bad input.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from aiscale import cost
from aiscale.config import ConfigError, Run
from aiscale.hpc.doctor.node import PACKAGES, Finding
from aiscale.hpc.sites import Site, find, here, names
from aiscale.hpc.submit.launcher import Launcher

ASK_ABOVE = 50  #: node-hours


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run", action="store_true", help="only check, and print the file as it would be submitted"
    )
    parser.add_argument("--yes", action="store_true", help=f"submit also what may cost over {ASK_ABOVE} node-hours")
    parser.add_argument("--sbatch", default="", metavar="OPTIONS", help="for sbatch, such as '-q debug -t 20'")
    parser.add_argument(
        "--site", metavar="NAME", help="whose rules hold (default: this machine's, or the file's folder)"
    )
    parser.add_argument("file", metavar="FILE", help="a launcher")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="for the launcher, behind its name")


def run(args: argparse.Namespace) -> int:
    dry, yes = args.dry_run or "--dry-run" in args.args, args.yes or "--yes" in args.args
    rest = [word for word in args.args if word not in ("--dry-run", "--yes")]
    path = Path(args.file)
    if not path.is_file():
        raise ConfigError(f"{path} is not a file: name a launcher, such as launchers/frontier/ddp.sbatch")
    job = Launcher.read(path, _site(args.site, path), sbatch=args.sbatch, args=rest)
    wrong = []
    for finding in [*examine(job), price(job)]:
        print(finding.line(), file=sys.stderr, flush=True)
        if finding.state == "wrong":
            wrong.append(finding.name)
    if wrong:
        print(f"not submitted: {', '.join(wrong)}", file=sys.stderr)
        return 1
    if dry:
        print(job.final(bad_nodes(job)), end="")
        return 0
    if node_hours(job) > ASK_ABOVE and not yes:
        most = f"{node_hours(job):,.4g} node-hours, more than {ASK_ABOVE}"
        print(f"not submitted: up to {most}: if you mean it, aiscale submit --yes {path}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="aiscale-submit-") as folder:
        file = Path(folder) / job.path.name
        file.write_text(job.final(bad_nodes(job)))
        return subprocess.run(["sbatch", str(file), *job.args]).returncode


def node_hours(job: Launcher) -> float:
    """The most that it takes, all starts of a chain together."""
    return job.nodes * job.hours * job.starts


def price(job: Launcher) -> Finding:
    """The most that it costs, in node-hours and as the site charges."""
    place, hours, options = job.place, node_hours(job), job.options
    cpus = int(options.get("cpus-per-task", "0")) * int(options.get("ntasks-per-node", "1"))
    charged = hours * place.charge_of(cpus, options.get("partition", ""), options.get("qos", ""))
    starts = f" x {job.starts} starts" if job.starts > 1 else ""
    nodes = f"{job.nodes} node{'s' * (job.nodes > 1)}"
    most = f"at most {nodes} x {job.hours:g} h{starts} = {hours:,.4g} node-hours"
    return Finding("price", "ok", f"{most}; charged: {charged:,.4g} {place.scheduler.charge_unit}")


def _site(name: str | None, path: Path) -> Site:
    if name:
        return find(name)
    if place := here():
        return place
    folder = path.absolute().parent.name
    if folder in names():
        return find(folder)
    raise ConfigError(
        f"this site is unknown: set --site to {', '.join(names())} or a profile of your own (.toml), before the file"
    )


# The checks -----------------------------------------------------------------------------------------------------------


LIMIT_S = 180  #: for a program that asks a busy file system or Slurm
_VERSIONS = f"""
import importlib.metadata, json
import aiscale
found = {{}}
for name in {PACKAGES}:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
#: loads each module in turn; prints the first that cannot be loaded, and why on standard error
_LOAD = r"""
type module > /dev/null 2>&1 || exit 9
for one in "$@"; do
  said="$(mktemp)"
  if ! module load "$one" > "$said" 2>&1 || grep -qiE 'unknown|unable to locate|error' "$said"; then
    echo "$one"; grep -m 1 . "$said" >&2; rm -f "$said"; exit 8
  fi
  rm -f "$said"
done
"""


def examine(job: Launcher) -> Iterator[Finding]:
    yield from environment(job)
    if run := job.run():
        yield from layout(job, run)
        yield corpus(job, run)
        yield space(job, run)
    yield from account(job)
    yield time_limit(job)
    yield modules(job)
    yield slurm(job)


def environment(job: Launcher) -> Iterator[Finding]:
    """Is the environment there, can aiscale be imported, are its versions those of the lock?"""
    where = job.settings.get("ENVIRONMENT", "")
    python = Path(where.removesuffix(".tar.gz")) / "bin/python"
    contained = "singularity" in job.site.shell.python  # then it is a link that leads somewhere in the container only
    build = f"launchers/{job.site.name}/build_environment.sh PREFIX" if job.site.build.create else "build one at PREFIX"
    remedy = f"{build}, then export AISCALE_ENVIRONMENT=PREFIX"
    if where == "container":
        yield Finding("environment", "ok", "a container, which Slurm checks")
    elif where.endswith(".tar.gz") and not Path(where).is_file():
        yield Finding("environment", "wrong", f"{where} is not there", remedy.replace(" PREFIX,", " --pack PREFIX,"))
    elif not (os.path.lexists(python) if contained else python.exists()):
        yield Finding("environment", "wrong", f"{where} has no bin/python", remedy)
    elif contained:
        yield Finding("environment", "ok", f"{where}, for a container that is not opened here")
    elif "SCRIPT" in job.settings:
        yield from script(job, where)
    else:
        yield from versions(job, where, python, remedy)


def script(job: Launcher, environment: str) -> Iterator[Finding]:
    """The participant's own script, which needs a Python and nothing of this kit."""
    yield Finding("environment", "ok", environment)
    name = job.args[0] if job.args else job.settings["SCRIPT"]
    if Path(name).is_file():
        yield Finding("script", "ok", name)
    else:
        yield Finding("script", "wrong", f"{name} is no file here", f"aiscale submit {job.path} YOUR_SCRIPT.py OPTIONS")


def versions(job: Launcher, environment: str, python: Path, remedy: str) -> Iterator[Finding]:
    """Can aiscale be imported there, and are its libraries those of the lock?"""
    # Modules are not loaded here: a torch of the site's module is not seen, which is no fault.
    done = _ask([python, "-c", _VERSIONS])
    if done is None or done.returncode:
        said = done.stderr.strip().splitlines()[-1] if done and done.stderr.strip() else "no answer"
        yield Finding("environment", "wrong", f"{python} cannot import aiscale: {said}", remedy)
        return
    found = json.loads(done.stdout.splitlines()[-1])
    shown = ", ".join(f"{name} {version}" for name, version in found.items())
    yield Finding("environment", "ok", environment + (f": {shown}" if shown else ""))
    lock = next((p for p in (job.path.parent / "requirements.lock", Path("requirements.lock")) if p.is_file()), None)
    if lock is None:
        return
    locked = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", lock.read_text(), re.M))
    other = [
        f"{name} is {version}, not {locked[name]}"
        for name, version in found.items()
        if name in locked and version.partition("+")[0] != locked[name].partition("+")[0]
    ]
    if other:
        yield Finding("versions", "warning", f"{'; '.join(other)} ({lock})", "build the environment again")
    else:
        yield Finding("versions", "ok", f"as in {lock}")


def layout(job: Launcher, run: Run) -> Iterator[Finding]:
    """What does not divide over this number of ranks, which they would say only in the job."""
    try:
        run.check_world(job.ranks)
    except ConfigError as error:
        what, _, remedy = str(error).partition(": ")
        yield Finding("layout", "wrong", f"{job.ranks} ranks: {what}", f"{remedy}, or --sbatch '-N NODES'")


def corpus(job: Launcher, run: Run) -> Finding:
    from aiscale.data.corpus import find_text

    try:
        find_text(run.data.corpus)
    except ConfigError as error:
        what, _, remedy = str(error).partition(": ")
        return Finding("corpus", "wrong", what, remedy)
    return Finding("corpus", "ok", run.data.corpus)


def checkpoint_bytes(run: Run, ranks: int) -> float:
    """One checkpoint: weights and two moments in fp32, and what Radius keeps on every rank."""
    size = 12.0 * cost.parameter_count(run.model)
    if run.compression.method == "radius":
        size += ranks * cost.radius_held(run)
    return size


def checkpoints(run: Run) -> tuple[int, int]:
    """(how many stay on the disk after the last step, how many are there at most)"""
    if 0 < run.loop.checkpoint_every < run.loop.steps or run.loop.checkpoint_minutes:
        return run.loop.keep_checkpoints, run.loop.keep_checkpoints + 1  # an old one goes when the new one is whole
    return (int(run.loop.save_last),) * 2


def space(job: Launcher, run: Run) -> Finding:
    """Is there room for the checkpoints that this run will write?"""
    runs = Path(job.settings.get("RUNS", "runs"))
    _, count = checkpoints(run)
    one = checkpoint_bytes(run, job.ranks)
    needed = f"{count} checkpoint{'s' * (count != 1)} of {size_of(one)} in {runs}"
    there = next(folder for folder in (runs.absolute(), *runs.absolute().parents) if folder.is_dir())
    rooms = {"free": shutil.disk_usage(there).free, "left of your quota": _quota_left(there)}
    for name, room in rooms.items():
        if room is not None and room < count * one:
            remedy = "free some space, or export AISCALE_RUNS=FOLDER on a larger file system"
            return Finding("space", "wrong", f"{needed}, and {size_of(room)} are {name}", remedy)
    return Finding("space", "ok", f"{needed}; {size_of(min(room for room in rooms.values() if room is not None))} free")


def _quota_left(folder: Path) -> float | None:
    """Bytes that a Lustre quota leaves this user; None: there is no quota, or nobody to ask."""
    done = _ask(["lfs", "quota", "-q", "-u", getpass.getuser(), folder])
    numbers = re.findall(r"\s(\d+)\*?", done.stdout) if done and done.returncode == 0 else []
    limits = [int(number) for number in numbers[1:3] if int(number)]
    return max(0, min(limits) - int(numbers[0])) * 1024 if limits else None


def account(job: Launcher) -> Iterator[Finding]:
    """Do account and QOS belong to this user?"""
    name, qos, rules = job.options.get("account", ""), job.options.get("qos", ""), job.site.scheduler
    remedy = "export SBATCH_ACCOUNT=YOURS, or edit the line --account"
    if not name:
        state = "wrong" if "account" in rules.required else "ok"
        yield Finding("account", state, "none", remedy if state == "wrong" else "")
        return
    whose = f"user={getpass.getuser()}"
    done = _ask(["sacctmgr", "--noheader", "--parsable2", "show", "assoc", whose, "format=account,qos"])
    if done is None or done.returncode or not done.stdout.strip():
        yield Finding("account", "warning", f"{name}; sacctmgr does not say whether it is yours")
        return
    yours = [line.partition("|")[::2] for line in done.stdout.splitlines()]
    bare, suffix = name.lower().removesuffix(rules.account_suffix), rules.account_suffix
    mine = [known.split(",") for theirs, known in yours if theirs.removesuffix(suffix) == bare]
    if not mine:
        yield Finding("account", "wrong", f"{name} is not yours: {', '.join(sorted({a for a, _ in yours}))}", remedy)
        return
    yield Finding("account", "ok", name)
    known = {each for names in mine for each in names}
    if qos and not {qos, rules.qos_prefix + qos} & known:
        shown = sorted({each.removeprefix(rules.qos_prefix) for each in known if each})
        yield Finding(
            "QOS", "wrong", f"{qos} is not open to {name}: {', '.join(shown)}", "aiscale submit --sbatch '-q NAME'"
        )


def time_limit(job: Launcher) -> Finding:
    partition, qos = job.options.get("partition", ""), job.options.get("qos", "")
    longest = job.site.scheduler.hours_for(job.nodes, partition, qos)
    places = " and ".join(filter(None, [partition, qos and f"QOS {qos}"]))
    where = f"{job.nodes} nodes" + f" in {places}" * bool(places)
    if longest is None:
        return Finding("time", "wrong", f"{where}: more nodes than it allows", "ask for fewer: --sbatch '-N NODES'")
    if job.hours > longest + 1e-9:
        remedy = f"--sbatch '-t {round(longest * 60)}', or another QOS or partition"
        return Finding("time", "wrong", f"{job.hours:g} h on {where}, which allows {longest:g} h", remedy)
    return Finding("time", "ok", f"{job.hours:g} of at most {longest:g} h on {where}")


def modules(job: Launcher) -> Finding:
    if not job.modules:
        return Finding("modules", "ok", "none")
    done = _ask(["bash", "-lc", _LOAD, "modules", *job.modules])
    if done is None or done.returncode == 9:
        return Finding("modules", "warning", "there is no command `module` here: is this a login node?")
    if done.returncode:
        which = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "one"
        why = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "it says nothing"
        remedy = f"module spider {which.partition('/')[0]} names those there are; then edit the line `module load`"
        return Finding("modules", "wrong", f"{which} cannot be loaded: {why}", remedy)
    return Finding("modules", "ok", " ".join(job.modules))


def slurm(job: Launcher) -> Finding:
    """What sbatch says of it without submitting it."""
    with tempfile.TemporaryDirectory(prefix="aiscale-submit-") as folder:
        file = Path(folder) / job.path.name
        file.write_text(job.final(bad_nodes(job)))
        done = _ask(["sbatch", "--test-only", file, *job.args])
    if done is None:
        return Finding("Slurm", "wrong", "sbatch is not here, or does not answer", "submit from a login node")
    said = [re.sub(r"^sbatch: (error: )?", "", line) for line in done.stderr.strip().splitlines()]
    # sbatch's last words where it finds no slurm.conf, by DNS neither, and where nobody listens
    if done.returncode and re.search("configuration source|[Uu]nable to contact slurm controller", done.stderr):
        return Finding("Slurm", "wrong", f"that of {job.site.title} does not answer here", "submit from a login node")
    if done.returncode:
        return Finding("Slurm", "wrong", f"refuses it: {'; '.join(said)}", "see the lines above, or the site's policy")
    return Finding("Slurm", "ok", said[-1] if said else "accepts it")


def bad_nodes(job: Launcher) -> list[str]:
    """The nodes on which jobs of this RUNS hung twice."""
    notes = Path(job.settings.get("RUNS", "runs")) / ".hung-nodes"
    lines = set(notes.read_text().splitlines()) if notes.is_file() else set()
    nodes = [line.split()[-1] for line in lines if line.strip()]
    return sorted({node for node in nodes if nodes.count(node) > 1})


def _ask(command: Sequence[str | Path]) -> subprocess.CompletedProcess | None:
    """Run a program; None if it is missing or does not answer."""
    try:
        return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None


def size_of(nbytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes / 1e6:,.0f} MB"
