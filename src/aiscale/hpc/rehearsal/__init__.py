"""A private, real Slurm cluster on this machine: a computing centre to rehearse on, gone when the command ends.

aiscale rehearse --site frontier --nodes 4 -- sbatch --wait job.sbatch

with rehearsal.Cluster(nodes=4, link="100mbit") as nodes:
    nodes.login(["srun", "-A", "PROJECT", "-t", "5", "-N", "4", "python", "train.py"])     # as on a login node
    nodes.set_link("10mbit")                                                              # from now on
"""

from aiscale.hpc.rehearsal.cluster import Cluster
from aiscale.hpc.rehearsal.settings import RehearsalError, why_not
