"""Shifter's options of sbatch and srun, --image and --module, as a plugin that is compiled when a rehearsal starts.

    build(Path("/var/tmp/x/etc"))       # shifter.so, which plugstack.conf then names

Without a C compiler the rehearsal does without: its sbatch then refuses --image as unknown.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from aiscale.hpc.rehearsal.needs import slurm_version

SOURCE = Path(__file__).parent / "templates/shifter.c"


def build(etc: Path) -> None:
    """Slurm loads what `etc`/plugstack.conf names, and a plugin only if it says that it is of the same version."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "")
    version = slurm_version()
    if not compiler or not version:
        return
    major, minor, micro = version
    number = f"-DSLURM_VERSION={major << 16 | minor << 8 | micro}"
    words = [compiler, "-shared", "-fPIC", number, "-o", etc / "shifter.so", SOURCE]
    if subprocess.run(words, capture_output=True).returncode == 0:
        (etc / "plugstack.conf").write_text(f"optional {etc}/shifter.so\n")
