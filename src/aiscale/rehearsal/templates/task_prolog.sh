#!/bin/bash
# Before each task; Slurm adds the variables that are printed. --gpu-bind=closest needs the site's topology: here it is.
order=(@closest@)
if [ -n "${order[*]}" ] && [[ "$SLURM_GPU_BIND" == *closest* ]]; then
  echo "export ROCR_VISIBLE_DEVICES=${order[$((SLURM_LOCALID % ${#order[@]}))]}"
fi
