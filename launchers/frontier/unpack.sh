# shellcheck shell=bash disable=SC2016  # what each node's shell expands
# ENVIRONMENT.tar.gz to each node's own disk, read by site.sh: submit with -C nvme.
sbcast --preserve --force "$ENVIRONMENT" "/mnt/bb/$USER/env.tar.gz"
unpack='mkdir -p "$1" && tar -I pigz -xf "$1.tar.gz" -C "$1" && PATH="$1/bin:$PATH" conda-unpack'
# A node that fails is named, also to a chain, whose next job does without it.
failed='echo "unpack: $SLURMD_NODENAME failed" >&2; if [ -n "$AISCALE_NOTE_SAVED" ]; then'
failed+=' printf "%s\n" stopped "bad $SLURMD_NODENAME" >> "$AISCALE_NOTE_SAVED"; fi; exit 1'
srun --kill-on-bad-exit=1 --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \
  --cpus-per-task=56 bash -c "$unpack || { $failed; }" unpack "/mnt/bb/$USER/env"
export PATH="/mnt/bb/$USER/env/bin:$PATH"
