"""Batch files: one sbatch file for each lesson at each site, rendered from one body and the site's profile.

Beside them, from the same profile, the script that makes the environment in which they run.

    aiscale launchers                            # writes launchers/frontier/*.sbatch and launchers/perlmutter/*.sbatch
    aiscale launchers --check                    # says which of them no longer are what would be rendered
    aiscale launchers --site mine.toml           # for your own cluster

lessons.py    what each launcher starts, and how much of a machine it needs
render.py     a lesson and a site become a file
templates/    body.sbatch.j2, the frame of all, and what it includes; build_environment.sh.j2
"""

from aiscale.hpc.launchers.lessons import LESSONS, Lesson, Variant
from aiscale.hpc.launchers.render import SHIPPED, drift, render, render_all, write

__all__ = ["LESSONS", "SHIPPED", "Lesson", "Variant", "drift", "render", "render_all", "write"]
