"""Is this node, or this job, ready to train? `aiscale doctor`.

node.py       one node: devices, memory, limits, versions, MPI, network, storage
preflight.py  the ranks of a job: an all-reduce, messages between all pairs, the same work on each; finds stragglers
command.py    the command line
"""
