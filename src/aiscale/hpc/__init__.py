"""Supercomputers: everything that is special about a computing centre.

sites/      profiles of centres: modules, partitions, limits, network settings; dated, with sources
job.py      the shell function that launchers take from the environment: banner, doctor, requeue
submit/     checks a launcher and what it needs, says what it costs, submits it
launchers/  sbatch files, rendered from one body and a profile
doctor/     is this machine, or this job, ready to train?
rehearsal/  a private, real Slurm on this machine
kernel.py   Jupyter kernels that load a site's modules
"""
