"""A private, real Slurm cluster on this machine, to rehearse on; it is gone when the command ends.

python launchers/rehearsal --site frontier --nodes 4 -- sbatch --wait job.sbatch

with rehearsal.Cluster(nodes=4) as nodes:            # with launchers/ on sys.path
    # as on a login node
    nodes.login(["srun", "-A", "PROJECT", "-t", "5", "-N", "4", "python", "train.py"])
"""

from rehearsal.cluster import Cluster
from rehearsal.settings import RehearsalError, why_not
