"""What a job may ask for and what it costs: by what Slurm says here, or by the site's profile.

On the machine only Slurm's own numbers are ticked. Where no Slurm answers, as on a laptop, the
profile's stand in, with the day on which their sources were read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from aiscale.errors import hint
from aiscale.site.asked import Rule, Rules
from aiscale.site.doctor import Finding
from aiscale.site.sbatch import Launcher

SIGNAL_EARLY_S = 60  #: Slurm may send a signal so much before its time (man sbatch, --signal)
START_NODES = 32  #: from here on it takes minutes until all ranks have met
#: The one report that is known: 2,016 of 2,048 ranks had met after 601 s, on 256 nodes.
START_REPORT = (256, 601.0)
START_SOURCE = "a user of Frontier, July 2026"


def examine(job: Launcher, rules: Rules | None) -> Iterator[Finding]:
    if rules:
        yield from account(job, rules)
        yield time_by_slurm(job, rules)
    else:
        yield time_by_profile(job)
    yield from time_to_save(job)
    if job.nodes >= START_NODES:
        yield start(job)
    yield price(job, rules)


def start(job: Launcher) -> Finding:
    """What is known of the time until all ranks have met."""
    nodes, seconds = START_REPORT
    text = f"how long {job.ranks:,} ranks take to meet is unknown; on {nodes} nodes it was over "
    text += f"{seconds:,.0f} s ({START_SOURCE})"
    counted = "it is counted in the steps" if start_s(job.nodes) else "count it in --time"
    return Finding("start", "warning", text, counted)


def start_s(nodes: int) -> float:
    """Seconds that pass at least until all ranks have met; 0 where nothing is known."""
    known_nodes, seconds = START_REPORT
    return seconds if nodes >= known_nodes else 0.0


def account(job: Launcher, rules: Rules) -> Iterator[Finding]:
    """Whether this user may charge the job's account, as sshare says."""
    name = job.options.get("account", "")
    ways = {name.lower(), name.lower() + job.site.scheduler.account_suffix}
    if not name:
        return
    if not rules.accounts:
        text = f"whether you may charge {name} is unknown: sshare does not say"
        yield Finding("account", "warning", text, "ask for your accounts at the site")
    elif ways & set(rules.accounts):
        yield Finding("account", "ok", f"{name}, as sshare says")
    else:
        text = f"{name} is none of yours, which are {', '.join(sorted(set(rules.accounts)))}"
        yield Finding("account", "wrong", text, "--sbatch '-A ACCOUNT'")


def time_by_slurm(job: Launcher, rules: Rules) -> Finding:
    partition = job.options.get("partition") or rules.default_partition
    qos = qos_name(job, rules)
    for kind, name, known in (
        ("partition", partition, rules.partitions),
        ("QOS", qos, rules.qos),
    ):
        if name and known and name not in known:
            remedy = f"--sbatch '-{kind[0].lower()} NAME': {hint(name, sorted(known))}"
            return Finding("time", "wrong", f"this machine has no {kind} {name}", remedy)
    holding = _holding(rules, partition, qos)
    for rule in holding:
        if broken := _broken(job, rule):
            return Finding("time", "wrong", *broken)
    entry = job.site.scheduler.qos_of(job.options.get("qos", ""))
    if job.chain > 1 and entry and not entry.may_chain:
        text = f"QOS {qos or 'of this job'} forbids chains of jobs, says {entry.source}"
        return Finding("time", "wrong", text, "another QOS, or no --chain")
    longest = min((rule.max_hours for rule in holding), default=math.inf)
    text = f"{job.hours:g} h on {job.nodes} nodes"
    if qos not in rules.qos:
        why = f"of QOS {qos}" if qos else "of your default QOS"
        text += f": the limits {why} are unknown, as sacctmgr does not say"
        return Finding("time", "warning", text, "read the site's own limits")
    profile = by_profile(job)
    if profile.state == "wrong":
        text = f"Slurm names no such limit, but {profile.text}"
        return Finding("time", "warning", text, profile.remedy)
    most = f"at most {longest:g} h" if longest < math.inf else "any time"
    names = " and ".join(rule.name for rule in holding)
    return Finding("time", "ok", f"{text}; {names} allow {most}, as Slurm says")


def _holding(rules: Rules, partition: str, qos: str) -> list[Rule]:
    """The rules under which a job runs: of the QOS, the partition, and the partition's own QOS."""
    found = [rules.qos.get(qos), rules.partitions.get(partition)]
    if found[1] and found[1].qos:
        found.append(rules.qos.get(found[1].qos))
    return [rule for rule in found if rule]


def _broken(job: Launcher, rule: Rule) -> tuple[str, str] | None:
    """(what a job asks for against a rule, the remedy), or None."""
    gpus = job.nodes * job.place.node.gpus
    where = f"{rule.name} ({rule.command})"
    if job.nodes > rule.max_nodes:
        return f"{job.nodes} nodes, and {where} allows {rule.max_nodes:g}", "--sbatch '-N NODES'"
    if job.nodes < rule.min_nodes:
        return f"{job.nodes} nodes, and {where} wants {rule.min_nodes}", "--sbatch '-N NODES'"
    if gpus > rule.max_gpus:
        return f"{gpus} GPUs, and {where} allows {rule.max_gpus:g}", "--sbatch '-N NODES'"
    if gpus < rule.min_gpus:
        return f"{gpus} GPUs, and {where} wants {rule.min_gpus}", "--sbatch '-N NODES'"
    if job.hours > rule.max_hours + 1e-9:
        remedy = f"--sbatch '-t {round(rule.max_hours * 60)}', or another QOS or partition"
        return f"{job.hours:g} h, and {where} allows {rule.max_hours:g} h", remedy
    return None


def qos_name(job: Launcher, rules: Rules) -> str:
    """As the machine calls the job's QOS, such as gpu_debug for -q debug; empty: unknown."""
    name = job.options.get("qos", "") or _default_qos(job, rules)
    long = job.site.scheduler.qos_prefix + name
    return long if name and job.place.node.gpus and long in rules.qos else name


def _default_qos(job: Launcher, rules: Rules) -> str:
    """Of the job's account, or the only one that this user's accounts have; empty: unknown."""
    each = rules.default_qos
    account = job.options.get("account", "").lower()
    if account in each:
        return each[account]
    return next(iter(each.values())) if len(set(each.values())) == 1 else ""


def time_by_profile(job: Launcher) -> Finding:
    found = by_profile(job)
    text = f"{found.text} (no Slurm here: the profile's, read on {job.site.read})"
    return Finding(found.name, found.state, text, found.remedy)


def by_profile(job: Launcher) -> Finding:
    """What the profile says of the job's size and time."""
    partition, qos = job.options.get("partition", ""), job.options.get("qos", "")
    rules = job.site.scheduler
    longest, rule = rules.hours_for(job.nodes, partition, qos), rules.qos_of(qos)
    places = " and ".join(filter(None, [partition, qos and f"QOS {qos}"]))
    where = f"{job.nodes} nodes" + f" in {places}" * bool(places)
    if longest is None:
        return Finding(
            "time",
            "wrong",
            f"{where}: more nodes than it allows",
            "ask for fewer: --sbatch '-N NODES'",
        )
    if job.chain > 1 and rule and not rule.may_chain:
        return Finding(
            "time", "wrong", f"QOS {qos} forbids chains of jobs", "another QOS, or no --chain"
        )
    if job.hours > longest + 1e-9:
        remedy = f"--sbatch '-t {round(longest * 60)}', or another QOS or partition"
        return Finding(
            "time", "wrong", f"{job.hours:g} h on {where}, which allows {longest:g} h", remedy
        )
    if rule and job.hours < rule.min_hours - 1e-9:
        text = f"{job.hours:g} h on {where}, where a job must ask for {rule.min_hours:g} h at least"
        remedy = f"--sbatch '-t {round(rule.min_hours * 60)}', or another QOS"
        return Finding("time", "wrong", text, remedy)
    if longest == math.inf:
        why = f"the profile has no {rules.unknown(partition, qos) or 'partition'}"
        text = f"{job.hours:g} h on {where}: the limit is unknown, as {why}"
        return Finding("time", "warning", text, "read the site's own limits")
    return Finding("time", "ok", f"{job.hours:g} of at most {longest:g} h on {where}")


def time_to_save(job: Launcher) -> Iterator[Finding]:
    """Whether the signal on which ranks save comes after they have begun."""
    asked_s = round(3600 * job.hours)
    if job.signal_s and asked_s <= job.signal_s + SIGNAL_EARLY_S:
        text = f"the job has {asked_s} s, and --signal asks ranks to save {job.signal_s} s before "
        text += f"its end or up to {SIGNAL_EARLY_S} s earlier: they would do nothing else"
        enough = -(-(job.signal_s + SIGNAL_EARLY_S) // 60) + 5
        remedy = f"--sbatch '-t {enough}', or a smaller --signal=USR1@SECONDS"
        yield Finding("signal", "wrong", text, remedy)


def node_hours(job: Launcher) -> float:
    """The most that it takes, all starts of a chain together."""
    return job.nodes * job.hours * job.starts


def price(job: Launcher, rules: Rules | None) -> Finding:
    """What it is charged: by Slurm's own factor of the QOS, or the profile's."""
    place, hours = job.place, node_hours(job)
    partition, qos = job.options.get("partition", ""), job.options.get("qos", "")
    starts = f" x {job.starts} {'jobs' if job.chain > 1 else 'starts'}" if job.starts > 1 else ""
    nodes = f"{job.nodes} node{'s' * (job.nodes > 1)}"
    most = f"at most {nodes} x {job.hours:g} h{starts} = {hours:,.4g} node-hours"
    payer = job.options.get("account", "your default account")
    rule = rules.qos.get(qos_name(job, rules)) if rules else None
    unknown = place.scheduler.unknown(partition, qos)
    if rules and not rule:
        why = "sacctmgr does not say the factor of its QOS"
    elif unknown and not rules:
        why = f"the profile has no {unknown}"
    else:
        why = ""
    if why:
        text = f"{most}; what {payer} is charged is unknown, as {why}"
        return Finding("price", "warning", text, "read the site's own charges")
    if rule:
        by = f"factor {rule.usage_factor:g} of {rule.name}, as Slurm says"
    else:
        by = f"by the profile, read on {job.site.read}"
    share = place.share_of(job.cpus, partition, qos)
    factor = rule.usage_factor if rule else place.scheduler.factor(qos)
    charged = hours * share * place.scheduler.charge_per_node_hour * factor
    text = f"{most}; charged to {payer}: {charged:,.4g} {place.scheduler.charge_unit} ({by})"
    return Finding("price", "ok", text)
