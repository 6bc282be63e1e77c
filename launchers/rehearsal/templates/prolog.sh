#!/bin/bash
# Before a job on its node: the fast storage of the node, for jobs that asked for it.
if [ -n "@nvme@" ] && [[ "$SLURM_JOB_CONSTRAINTS" == *nvme* ]]; then
  mkdir -p "@nvme@/$SLURM_JOB_USER"
fi
exit 0
