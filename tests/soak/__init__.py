"""The soak test: jobs are disturbed repeatedly under a private Slurm, and checkpoints damaged; is anything lost?

plan.py      the disturbances of a run and their steps, drawn from a seed so that a failure can be repeated
testbed.py   a private Slurm of two nodes, a launcher, and the four disturbances
rounds.py    one run, disturbed as planned, then compared bit for bit with the undisturbed one
damage.py    damages a checkpoint in one place, and resumes from it
journal.py   what is done so far, to resume an interrupted soak
__main__.py  the command line
"""

from soak.damage import harm, resume_after_damage
from soak.plan import KINDS, Event, SoakError, plan
from soak.rounds import play, reference
from soak.testbed import Testbed

__all__ = ["KINDS", "Event", "Testbed", "SoakError", "harm", "plan", "play", "reference", "resume_after_damage"]
