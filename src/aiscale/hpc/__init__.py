"""What a computing centre asks for.

sites/      profiles of centres: modules, partitions, limits, network settings, dated and with sources
launchers/  sbatch files, rendered from one body and a profile
doctor/     is this machine, or this job, ready to train
rehearsal/  a private, real Slurm on this machine
jupyter/    kernels that load a site's modules
"""
