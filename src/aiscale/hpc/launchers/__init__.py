"""Launchers: one sbatch file per lesson and site, and a script that builds their environment."""

from aiscale.hpc.launchers.lessons import LESSONS
from aiscale.hpc.launchers.render import SHIPPED, drift, render, render_all
