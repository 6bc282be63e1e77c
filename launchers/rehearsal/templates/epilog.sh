#!/bin/bash
# After a job on its node: what it left on the fast storage is lost.
if [ -n "@nvme@" ]; then rm -rf "@nvme@/${SLURM_JOB_USER:?}"; fi
exit 0
