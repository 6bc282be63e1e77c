"""Does anything get lost? Jobs disturbed over and over under a private Slurm, and checkpoints damaged.

plan.py      what happens to a run, at which steps: drawn from a seed, so that a failure can be repeated
testbed.py   a private Slurm of two nodes, a launcher, and the four disturbances
rounds.py    one run disturbed as planned, then held to the undisturbed one to the bit
damage.py    a checkpoint harmed in one place, and what a resumed run makes of it
journal.py   what is done so far, for one that was interrupted
__main__.py  the command line
"""

from soak.damage import harm, resume_after_damage
from soak.plan import KINDS, Event, SoakError, plan
from soak.rounds import play, reference
from soak.testbed import Testbed

__all__ = ["KINDS", "Event", "Testbed", "SoakError", "harm", "plan", "play", "reference", "resume_after_damage"]
