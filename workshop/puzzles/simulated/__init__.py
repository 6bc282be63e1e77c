"""The puzzles of workshop/puzzles: simulated ranks that draw themselves, and targets that are checked.

    from simulated import check
    check("ring", ring)

`machine` has what ranks share, `ranks` what a rank can do, `world` runs a program on all of them, `problems` the
puzzles and their targets, `checking` judges an answer, `drawing` draws it.
"""

from simulated.checking import best_answers, check
from simulated.machine import SimulationError

__all__ = ["SimulationError", "best_answers", "check"]
