"""The shell function that launchers take from the environment: banner, unpacking, doctor, requeue, engines.

    eval "$(python -m aiscale.hpc.job)"     # in a batch script; then: job begin, job doctor, job engines

This prints job.sh, which says what each part does, after what it must know of the site; it starts fast.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from aiscale.hpc.sites import Site, SiteError, here


def facts(site: Site | None, env: Mapping[str, str]) -> dict[str, str]:
    """What job.sh reads: the charge of a node and an hour, its unit, the QOS in which chains are forbidden, and the
    CPUs of a node."""
    if site is None:
        return {"charge": "1", "unit": "node-hours", "unchained": "debug", "cpus": "1"}
    if site.cpus.node.ranks and not env.get("SLURM_GPUS_ON_NODE"):
        site = site.on_cpus()
    cpus = int(re.match(r"\d*", env.get("SLURM_JOB_CPUS_PER_NODE", ""))[0] or 0)
    charge = site.charge_of(cpus, env.get("SLURM_JOB_PARTITION", ""), env.get("SLURM_JOB_QOS", ""))
    rules = site.scheduler
    unchained = [name for name, qos in rules.qos.items() if not qos.may_chain]
    unchained += [rules.qos_prefix + name for name in unchained if rules.qos_prefix]  # as a job sees them
    each = str(site.node.cpus_per_rank * site.node.ranks_per_node)
    return {"charge": f"{charge:g}", "unit": rules.charge_unit, "unchained": " ".join(unchained), "cpus": each}


def main() -> None:
    try:
        site = here()
    except SiteError:  # AISCALE_SITE names a profile that is not here: nothing to end a job for
        site = None
    for name, value in facts(site, os.environ).items():
        print(f"job_{name}={shlex.quote(value)}")
    print((Path(__file__).parent / "job.sh").read_text())


if __name__ == "__main__":
    main()
