# What a launcher does besides training. `eval "$(python -m aiscale.hpc.job)"` defines it.
#
#   job begin [FOLDER]   prints the banner; makes RUNS; ends a job that was restarted too often; sends ENVIRONMENT.tar.gz
#                        to every node's FOLDER, and uses it from there
#   job doctor OPTIONS   checks nodes and network on the job's ranks; OPTIONS are srun's
#   job end STATUS       with CHAIN=1 requeues a job that was stopped in time or hung; called when the file ends
#   job engines PER_NODE OPTIONS   ranks for a notebook outside the job: engines.sh
#
# It reads RUNS, ENVIRONMENT, and the array `python` (words that start Python).
# AISCALE_DOCTOR=strict ends a job that is not ready to train, AISCALE_DOCTOR=off does not look; CHAIN=1 and RESTARTS
# allow a job to requeue itself.
# shellcheck shell=bash disable=SC2154  # python is the launcher's

job() { "job_$1" "${@:2}"; }
job_say() { echo "job: $*" >&2; }

job_begin() { # job_begin [FOLDER]
  local cap="${RESTARTS:-5}"
  job_restart="${SLURM_RESTART_COUNT:-0}"
  export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1         # jobs download nothing
  export AISCALE_NOTE_SAVED="$RUNS/.saved-$SLURM_JOB_ID" # `aiscale train` writes there what it saved, and how it ended
  mkdir -p "$RUNS"
  rm -f "$AISCALE_NOTE_SAVED"
  {
    echo "=== ${SLURM_JOB_NAME:-job}, job $SLURM_JOB_ID, $(date '+%F %T %Z'), restart $job_restart of at most $cap"
    echo "=== nodes: ${SLURM_JOB_NODELIST:-$HOSTNAME}; QOS: ${SLURM_JOB_QOS:-unknown}"
  } >&2
  if [ "$job_restart" -gt "$cap" ]; then
    job_say "$job_restart restarts, and RESTARTS allows $cap: it ends here. To go on, submit the file again"
    exit 1
  fi
  # A job that is cancelled ends at once: nothing may put it back into the queue.
  trap 'trap - EXIT; exit 143' TERM
  trap 'job_end $?' EXIT
  if [ $# -gt 0 ]; then job_unpack "$1"; fi
}

job_unpack() { # job_unpack FOLDER
  case "$ENVIRONMENT" in *.tar.gz) ;; *) return 0 ;; esac
  local packed="$ENVIRONMENT" each=(--nodes="$SLURM_NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1)
  each+=(--ntasks="$SLURM_NNODES" --cpus-per-task="${job_cpus:-1}") # with all cores of a node
  ENVIRONMENT="$1/env"
  # Half a file would fail later, and look like something else.
  sbcast --preserve --force "$packed" "$ENVIRONMENT.tar.gz" || exit 1
  # shellcheck disable=SC2016  # for each node's shell
  srun "${each[@]}" bash -c 'mkdir -p "$1" && tar --use-compress-program=pigz -xf "$1.tar.gz" -C "$1"' unpack \
    "$ENVIRONMENT" || exit 1
  export PATH="$ENVIRONMENT/bin:$PATH"
  srun "${each[@]}" conda-unpack || exit 1 # puts each node's own path into the files that name the environment's
}

job_doctor() { # job_doctor OPTIONS
  local status=0
  if [ "${AISCALE_DOCTOR:-}" = off ]; then return 0; fi
  srun --kill-on-bad-exit=1 "$@" "${python[@]}" -m aiscale doctor || status=$?
  if [ "$status" = 138 ]; then # USR1, which says that the time is nearly up
    job_say "the time was nearly up before training began: ask for more"
    exit 1
  elif [ "$status" != 0 ] && [ "${AISCALE_DOCTOR:-}" = strict ]; then
    job_say "not ready to train, and AISCALE_DOCTOR is strict: it ends here"
    exit 1
  elif [ "$status" != 0 ]; then
    job_say "warning: not ready to train, for the reasons above; going on all the same (AISCALE_DOCTOR=strict would end)"
  fi
}

job_end() { # job_end STATUS: requeues a job that has more to do, if that was asked for and is not a mistake
  local step why="" stopped=""
  trap - EXIT # once
  step="$(sed -n 's/.*step_0*\([0-9][0-9]*\)$/\1/p' "$AISCALE_NOTE_SAVED" 2> /dev/null | tail -n 1)" || true
  if grep -qsE '^(stopped|hung)' "$AISCALE_NOTE_SAVED" || [ "$1" = 130 ] || [ "$1" = 76 ]; then stopped=yes; fi
  rm -f "$AISCALE_NOTE_SAVED"
  if [ "$1" = 0 ] || [ -z "$stopped" ]; then return; fi
  if [ "${CHAIN:-0}" != 1 ]; then
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
