"""What a rehearsal needs on this machine: Slurm, and permission to make namespaces. `why_not()` is "" if it has both.

Root may always make namespaces; another user needs a user namespace, which the kernel may refuse.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess

from aiscale.config import ConfigError

#: Daemons and network tools are in folders that are not on an ordinary user's PATH.
SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"

_PROGRAMS = "slurmctld slurmd munged srun sbatch ip tc unshare nsenter setpriv mount hostname".split()
_REMEDY = "sudo apt-get install slurm-wlm munge iproute2"

#: Namespaces of a rehearsal: network, mounts, hostname, processes.
NAMESPACES = ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation=private"]


class RehearsalError(ConfigError):
    """A rehearsal is impossible here; the message is one line that says what to change."""


def search_path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:{SYSTEM_PATH}"


def slurm_version() -> tuple[int, ...]:
    """The version of this machine's Slurm, such as (22, 5, 8); empty if it is unknown."""
    said = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, env={"PATH": search_path()}).stdout
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else ()


def unshare() -> list[str]:
    """The command that runs another one in new namespaces."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
    return ["unshare", *user, *NAMESPACES]


@functools.cache
def why_not() -> str:
    """Why this machine cannot rehearse, in one line with the remedy; empty if it can."""
    for program in _PROGRAMS:
        if not shutil.which(program, path=search_path()):
            return f"{program} is not here: {_REMEDY}"
    tried = subprocess.run(
        [*unshare(), "true"], capture_output=True, text=True, timeout=60, env={**os.environ, "PATH": search_path()}
    )
    if tried.returncode == 0:
        return ""
    why = tried.stderr.strip().splitlines()[-1:] or [f"unshare ended with status {tried.returncode}"]
    if os.geteuid() == 0:
        return f"namespaces are not allowed here ({why[0]}): in a container, start it with --privileged"
    return (
        f"namespaces are not allowed here ({why[0]}): rehearse as root, or "
        "sudo sysctl kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0"
    )
