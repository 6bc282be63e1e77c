# shellcheck shell=bash
# A chain of jobs, each of which goes on where the one before stopped. site.sh reads it in two kinds
# of jobs:
#   aiscale submit --chain N    N jobs. AISCALE_CHAIN: the id of the first, or `first` in that one
#   CHAIN=1 sbatch --requeue    one job, which requeues itself when it was stopped for its time,
#                               at most RESTARTS times (5)
# Trainers write `stopped` or `hung` into the file AISCALE_NOTE_SAVED if steps are left.
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

chain_end() { # chain_end STATUS
  local stopped="" why=""
  trap - EXIT # once
  if grep -qsE '^(stopped|hung)' "$AISCALE_NOTE_SAVED"; then stopped=yes; fi
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
  else
    trap '' TERM # requeuing ends this script, which is not done
    scontrol requeue "$SLURM_JOB_ID" ||
      chain_say "Slurm refused to requeue it: submit it by CHAIN=1 sbatch --requeue"
  fi
}
trap 'trap - EXIT; exit 143' TERM # a job that is cancelled does not go back into the queue
trap 'chain_end $?' EXIT
