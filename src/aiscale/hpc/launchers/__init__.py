"""Launchers: one sbatch file per lesson and site, and a script that builds their environment.

    aiscale launchers                            # writes launchers/frontier/*.sbatch and launchers/perlmutter/*.sbatch
    aiscale launchers --check                    # names those that differ from what would be rendered
    aiscale launchers --site mine.toml           # for your own cluster

lessons.py    what each launcher starts, and the ranks and GPU memory it needs
render.py     renders a lesson for a site
templates/    body.sbatch.j2, the frame of all, and what it includes (X.edit.j2: settings of X); build_environment.sh.j2
"""

from aiscale.hpc.launchers.lessons import LESSONS
from aiscale.hpc.launchers.render import SHIPPED, drift, render, render_all
