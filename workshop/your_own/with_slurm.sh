#!/bin/bash
# Tells torch who this rank is, as torchrun would; a line before the command that srun starts for every rank:
#   srun --ntasks-per-node=4 --kill-on-bad-exit=1 bash with_slurm.sh python train_ddp.py
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
: "${MASTER_ADDR:=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}"  # rank 0's node
: "${MASTER_PORT:=$((20000 + SLURM_JOB_ID % 10000))}"  # two jobs do not meet, nor Linux's ports from 32768
export MASTER_ADDR MASTER_PORT
exec "$@"
