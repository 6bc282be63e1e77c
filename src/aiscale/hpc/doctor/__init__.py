"""Is this node, or this job, fit to train? `aiscale doctor`.

node.py       what this node has: devices, memory, files, versions, MPI, network, storage
preflight.py  the ranks of a job: an all-reduce, messages between all pairs, the same work on each; who is slow
command.py    the command line
"""

from aiscale.hpc.doctor.node import Finding, examine
from aiscale.hpc.doctor.preflight import Preflight, preflight

__all__ = ["Finding", "Preflight", "examine", "preflight"]
