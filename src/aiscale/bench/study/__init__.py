"""Studies: a base, axes that are varied, and one measurement for each cell; `aiscale bench study FILE.toml`.

    study = read_study("laptop")                  # a study that the kit ships, or a TOML file
    rows = run_study(study, "runs/laptop.csv")    # resumes; a crashed cell is a row, too
    summary(rows); side_by_side(rows, load("other.csv"))

The questions are those of Turing Technical Report 3 (doi:10.5281/zenodo.13349541), and so is the way of measuring: the
second epoch is timed, and the time is the mean over ranks. Ratios are of rank 0's median step times the steps, which
another program's second does not move.
"""

from aiscale.bench.study.engine import run_study
from aiscale.bench.study.grid import read_study
from aiscale.bench.study.results import load, side_by_side, summary
