"""A private, real Slurm cluster on this machine: a computing centre to rehearse on, gone when the command ends.

aiscale rehearse --site frontier --nodes 4 -- sbatch --wait job.sbatch

with rehearsal.Cluster(nodes=4, link="100mbit") as nodes:
    nodes.run(["python", "train.py"], ntasks=4)     # srun: one rank on each virtual node
    nodes.set_link("10mbit")                        # from now on
"""

from aiscale.hpc.rehearsal.cluster import Call, Cluster
from aiscale.hpc.rehearsal.settings import RehearsalError, why_not

__all__ = ["Call", "Cluster", "RehearsalError", "why_not"]
