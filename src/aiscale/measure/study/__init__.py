"""Studies of this machine, `aiscale study FILE.toml`: a base, axes that are varied, measurements.

    study = read_study("laptop")                  # a study that the kit ships, or a TOML file
    rows = run_study(study, "runs/laptop")        # resumes; a crashed cell is a row, too
    summary(rows); side_by_side(rows, load("runs/other"))

Questions and way of measuring are those of Turing Technical Report 3 (doi:10.5281/zenodo.13349541).
"""

from aiscale.measure.study.engine import load, run_study
from aiscale.measure.study.grid import read_study
from aiscale.measure.study.results import side_by_side, summary
