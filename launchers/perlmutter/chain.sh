# shellcheck shell=bash
# A chain of jobs, each of which goes on where the one before stopped. site.sh reads it in two kinds
# of jobs:
#   aiscale submit --chain N    N jobs. AISCALE_CHAIN: the id of the first, or `first` in that one
#   CHAIN=1 sbatch --requeue    one job, which requeues itself when it was stopped for its time,
#                               at most RESTARTS times (5)
# Trainers write `stopped` or `hung` into the file AISCALE_NOTE_SAVED if steps are left, and
# `bad NODE` for a node whose ranks did not come; nodes.sh does for one that is not ready.
chain_say() { echo "chain: $*" >&2; }

chain_restart="${SLURM_RESTART_COUNT:-0}" chain_cap="${RESTARTS:-5}"
chain_first="${AISCALE_CHAIN:-first}"
if [ "$chain_first" = first ]; then chain_first="$SLURM_JOB_ID"; fi
chain_over="$RUNS/.over-$chain_first" # a chain that has ended has it, with the reason
export AISCALE_NOTE_SAVED="$RUNS/.saved-$SLURM_JOB_ID"
mkdir -p "$RUNS"
rm -f "$AISCALE_NOTE_SAVED"
chain_say "job $SLURM_JOB_ID, restart $chain_restart of at most $chain_cap; first job: $chain_first"
if [ "$chain_first" = "$SLURM_JOB_ID" ]; then
  rm -f "$chain_over"
elif [ -e "$chain_over" ]; then
  chain_say "nothing to do: $(cat "$chain_over")"
  exit "$(grep -vc ' 0$' "$chain_over")" # 1 where that job failed
fi
if [ "$chain_restart" -gt "$chain_cap" ]; then
  chain_say "$chain_restart restarts, and RESTARTS allows $chain_cap. To go on, submit it again"
  exit 1
fi

chain_without() { # chain_without NODES WORDS: the jobs that squeue WORDS names do without them
  local job excluded count most="$((SLURM_NNODES / 10))"
  if [ -z "$1" ]; then return; fi
  # Many at once are rather a fault of the program, or of what nodes share.
  if [ "$most" -lt 2 ]; then most=2; fi
  count="$(tr , '\n' <<< "$1" | wc -l)"
  if [ "$count" -gt "$most" ] || [ "$((2 * count))" -gt "$SLURM_NNODES" ]; then
    chain_say "$count of $SLURM_NNODES nodes failed ($1): no job does without so many"
    return
  fi
  while read -r job excluded; do
    excluded="${excluded#(null)}"
    chain_say "job $job will do without $1"
    scontrol update JobId="$job" ExcNodeList="$1${excluded:+,$excluded}" ||
      chain_say "Slurm refused that: scancel $job, and submit with --exclude=$1"
  done < <(squeue --me --noheader --format="%A %x" "${@:2}")
}

chain_end() { # chain_end STATUS
  local stopped="" why="" bad
  trap - EXIT # once
  if grep -qsE '^(stopped|hung)' "$AISCALE_NOTE_SAVED"; then stopped=yes; fi
  bad="$(sed -n 's/^bad //p' "$AISCALE_NOTE_SAVED" 2> /dev/null | sort -u | paste -sd,)" || true
  rm -f "$AISCALE_NOTE_SAVED"
  if [ -z "$stopped" ]; then
    if [ -n "${AISCALE_CHAIN:-}" ]; then
      echo "job $SLURM_JOB_ID ended with status $1" > "$chain_over"
    fi
    return
  fi
  if [ -n "${AISCALE_CHAIN:-}" ]; then
    why="the chain's next job goes on"
  elif [[ " debug gpu_debug " == *" ${SLURM_JOB_QOS:-unknown} "* ]]; then
    why="QOS $SLURM_JOB_QOS forbids chains of jobs: to go on, submit it again"
  elif [ "$chain_restart" -ge "$chain_cap" ]; then
    why="it was restarted $chain_restart times, the most that RESTARTS allows"
  fi
  if [ -n "$why" ]; then
    chain_say "stopped; $why"
    chain_without "$bad" --states=PENDING --name="$SLURM_JOB_NAME"
    return
  fi
  trap '' TERM # requeuing ends this script, which is not done
  if scontrol requeue "$SLURM_JOB_ID"; then
    chain_without "$bad" --jobs="$SLURM_JOB_ID"
  else
    chain_say "Slurm refused to requeue it: submit it by CHAIN=1 sbatch --requeue"
  fi
}
trap 'trap - EXIT; exit 143' TERM # a job that is cancelled does not go back into the queue
trap 'chain_end $?' EXIT
