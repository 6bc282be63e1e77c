"""`python -m aiscale.site.job [engines.sh]`: prints shell functions and two facts of the site.

Launchers take the functions from the environment; job.sh and engines.sh say what each does.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from aiscale.site.profiles import Site, SiteError, here


def facts(place: Site | None) -> dict[str, str]:
    """The QOS where chains of jobs are forbidden, by the names a job may see, and a node's CPUs."""
    if place is None:
        return {"unchained": "debug", "cpus": "1"}
    rules, node = place.scheduler, place.node
    names = [name for name, qos in rules.qos.items() if not qos.may_chain]
    names += [rules.qos_prefix + name for name in names if rules.qos_prefix]
    return {"unchained": " ".join(names), "cpus": str(node.cpus_per_rank * node.ranks_per_node)}


def main() -> None:
    try:
        place = here()
    except SiteError:  # AISCALE_SITE names a profile that is not here: nothing to end a job for
        place = None
    for name, value in facts(place).items():
        print(f"job_{name}={shlex.quote(value)}")
    for name in ("job.sh", *sys.argv[1:]):
        print(Path(__file__).with_name(name).read_text())


if __name__ == "__main__":
    main()
