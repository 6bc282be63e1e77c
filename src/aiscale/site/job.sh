# What a launcher does besides training. `eval "$(python -m aiscale.site.job)"` defines it.
#   job begin [FOLDER]     banner; RUNS; ends a job that has nothing to do; unpacks ENVIRONMENT.tar.gz in nodes' FOLDER
#   job doctor WORDS       nodes and network, by `WORDS aiscale doctor`: up to 16 nodes, or where AISCALE_DOCTOR is set
#   job end STATUS         when the file ends: requeues a job that was stopped in time (CHAIN=1), or ends its chain
#   job engines N OPTIONS  N ranks a node for a notebook outside the job (engines.sh); OPTIONS are srun's
# It reads RUNS, ENVIRONMENT and the array `python`. CHAIN=1 and RESTARTS: launchers/README.md. AISCALE_CHAIN, from
# `aiscale submit --chain`: the id of the chain's first job, or `first` in that job itself.
# shellcheck shell=bash disable=SC2154

job() { "job_$1" "${@:2}"; }
job_say() { echo "job: $*" >&2; }

job_begin() {
  local cap="${RESTARTS:-5}"
  job_restart="${SLURM_RESTART_COUNT:-0}" job_first="${AISCALE_CHAIN:-$SLURM_JOB_ID}"
  if [ "$job_first" = first ]; then job_first="$SLURM_JOB_ID"; fi
  job_over="$RUNS/.over-$job_first"              # a chain that has ended has it, with the reason
  export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 # jobs download nothing
  export AISCALE_NOTE_SAVED="$RUNS/.saved-$SLURM_JOB_ID" # trainers write there what they saved, and how they ended
  mkdir -p "$RUNS"
  rm -f "$AISCALE_NOTE_SAVED"
  {
    echo "=== ${SLURM_JOB_NAME:-job}, job $SLURM_JOB_ID, $(date '+%F %T %Z'), restart $job_restart of at most $cap"
    echo "=== nodes: ${SLURM_JOB_NODELIST:-$HOSTNAME}; QOS: ${SLURM_JOB_QOS:-unknown}; first of its chain: $job_first"
  } >&2
  if [ "$job_first" = "$SLURM_JOB_ID" ]; then
    rm -f "$job_over"
  elif [ -e "$job_over" ]; then
    job_say "nothing to do: $(cat "$job_over")"
    exit "$(grep -vc ' 0$' "$job_over")" # 1 where that job failed
  fi
  if [ "$job_restart" -gt "$cap" ]; then
    job_say "$job_restart restarts, and RESTARTS allows $cap: it ends here. To go on, submit the file again"
    exit 1
  fi
  trap 'trap - EXIT; exit 143' TERM # a job that is cancelled does not go back into the queue
  trap 'job_end $?' EXIT
  if [ $# -gt 0 ]; then job_unpack "$1"; fi
}

job_unpack() {
  case "$ENVIRONMENT" in *.tar.gz) ;; *) return 0 ;; esac
  local packed="$ENVIRONMENT" each=(--nodes="$SLURM_NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1)
  each+=(--ntasks="$SLURM_NNODES" --cpus-per-task="${job_cpus:-1}") # with all cores of a node
  ENVIRONMENT="$1/env"
  sbcast --preserve --force "$packed" "$ENVIRONMENT.tar.gz" || exit 1
  # shellcheck disable=SC2016  # for each node's shell
  srun "${each[@]}" bash -c 'mkdir -p "$1" && tar --use-compress-program=pigz -xf "$1.tar.gz" -C "$1"' unpack \
    "$ENVIRONMENT" || exit 1
  export PATH="$ENVIRONMENT/bin:$PATH"
  srun "${each[@]}" conda-unpack || exit 1
}

job_doctor() { # AISCALE_DOCTOR: strict ends a job that is not ready, off never looks
  local wish="${AISCALE_DOCTOR:-}"
  if [ -z "$wish" ] && [ "$SLURM_NNODES" -gt 16 ]; then wish=off; fi
  if [ "$wish" = off ] || "$@" aiscale doctor || [ "$wish" != strict ]; then return; fi
  job_say "AISCALE_DOCTOR=strict: put right what is marked above, or leave the variable out"
  exit 1
}

job_end() {
  local step why="" stopped=""
  trap - EXIT # once
  step="$(sed -n 's/.*\/0*\([0-9][0-9]*\)$/\1/p' "$AISCALE_NOTE_SAVED" 2> /dev/null | tail -n 1)" || true
  if grep -qsE '^(stopped|hung)' "$AISCALE_NOTE_SAVED"; then stopped=yes; fi
  rm -f "$AISCALE_NOTE_SAVED"
  if [ -z "$stopped" ]; then
    if [ -n "${AISCALE_CHAIN:-}" ]; then echo "job $SLURM_JOB_ID ended with status $1" > "$job_over"; fi
    return
  fi
  if [ -n "${AISCALE_CHAIN:-}" ]; then
    why="the chain's next job does so by itself"
  elif [ "${CHAIN:-0}" != 1 ]; then
    why="with CHAIN=1 sbatch --requeue it would do so by itself"
  elif [[ " ${job_unchained:-debug} " == *" ${SLURM_JOB_QOS:-unknown} "* ]]; then
    why="QOS $SLURM_JOB_QOS forbids chains of jobs"
  elif [ "$job_restart" -ge "${RESTARTS:-5}" ]; then
    why="it was restarted $job_restart times, the most that RESTARTS allows"
  fi
  if [ -n "$why" ]; then
    job_say "stopped; step saved last: ${step:-none}. To go on, submit the file again; $why"
  else
    trap '' TERM # requeuing ends this script, which is not done
    scontrol requeue "$SLURM_JOB_ID" || job_say "Slurm refused to requeue it: submit with CHAIN=1 sbatch --requeue"
  fi
}
