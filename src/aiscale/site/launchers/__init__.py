"""Launchers: one sbatch file per lesson and site, and a script that builds their environment."""

from aiscale.site.launchers.lessons import LESSONS
from aiscale.site.launchers.render import SHIPPED, drift, render, render_all
