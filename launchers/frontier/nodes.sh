# shellcheck shell=bash disable=SC2154  # site.sh sets container
# Before a training: each node by itself, then the network. A node that is not ready is named and
# ends the job; the next one of a chain does without it.
#   AISCALE_DOCTOR=strict    so does a doubt about the network
#   AISCALE_DOCTOR=lenient   the job trains all the same
#   AISCALE_DOCTOR=off       nobody looks
#   DOCTOR_NODES             the network is tried in jobs of up to so many nodes (16), for it waits
#                            for the slowest
nodes_say() { echo "nodes: $*" >&2; }

nodes_ready() { # prints `ready NAME` for those that are; one that hangs holds up no other
  local cpus="$((SLURM_NTASKS_PER_NODE * 7))"
  timeout -k 30 900 env -u SLURM_LABELIO srun --kill-on-bad-exit=0 --wait=0 \
    --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \
    --cpus-per-task="$cpus" --gpus-per-node="$SLURM_GPUS_PER_NODE" \
    timeout -k 30 600 "${container[@]}" python -m aiscale doctor --node
}

nodes_check() { # its status is 1 where training should not begin
  local ready bad count
  ready="$(nodes_ready | sed -n 's/^ready //p')" || true
  bad="$(comm -23 <(scontrol show hostnames | sort) <(sort <<< "$ready"))"
  count="$(wc -w <<< "$bad")"
  bad="$(paste -sd, <<< "$bad")"
  if [ "$count" -eq 0 ]; then
    echo "nodes: each of $SLURM_NNODES is ready by itself"
    if [ "$SLURM_NNODES" -gt "${DOCTOR_NODES:-16}" ]; then return 0; fi
    launch python -m aiscale doctor --patience 300 || [ "${AISCALE_DOCTOR:-}" != strict ]
    return
  fi
  nodes_say "not ready: $bad"
  if [ "$((2 * count))" -gt "$SLURM_NNODES" ]; then
    nodes_say "more than half of the nodes: look at what nodes share first, such as $ENVIRONMENT"
  else
    nodes_say "tell the centre, and do without: sbatch --exclude=$bad"
  fi
  if [ "${AISCALE_DOCTOR:-}" = lenient ]; then return 0; fi
  if [ -n "${AISCALE_NOTE_SAVED:-}" ] && [ "$((2 * count))" -le "$SLURM_NNODES" ]; then
    printf '%s\n' stopped "bad $bad" >> "$AISCALE_NOTE_SAVED" # the chain goes on, without them
  fi
  return 1
}

if [ "${AISCALE_DOCTOR:-}" != off ]; then nodes_check; fi
