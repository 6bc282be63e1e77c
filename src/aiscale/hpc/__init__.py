"""Supercomputers: everything that is special about a computing centre.

sites/      profiles of centres: modules, partitions, limits, network settings; dated, with sources
launchers/  sbatch files, rendered from one body and a profile
job.py      the shell functions that launchers take from the environment: job.sh, engines.sh
submit.py   checks a launcher and what it needs, says what it costs, submits it
doctor.py   is this machine, or this job, ready to train?
kernel.py   a Jupyter kernel that loads a site's modules
"""
