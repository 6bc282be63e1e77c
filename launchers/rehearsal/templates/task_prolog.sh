#!/bin/bash
# Before each task; Slurm adds the variables that are printed.
# --gpu-bind=closest needs the site's topology: here it is.
order=(@closest@)
if [ -n "${order[*]}" ] && [[ "$SLURM_GPU_BIND" == *closest* ]]; then
  echo "export ROCR_VISIBLE_DEVICES=${order[$((SLURM_LOCALID % ${#order[@]}))]}"
fi
# The cores that a launcher counts on are not there: as many threads for each rank would only be in each other's way.
if [ "${OMP_NUM_THREADS%%[!0-9]*}" -gt 1 ] 2> /dev/null; then
  threads=$(($(env -u OMP_NUM_THREADS nproc) / ${SLURM_STEP_NUM_TASKS:-1}))
  echo "export OMP_NUM_THREADS=$((threads > 1 ? threads : 1))"
fi
