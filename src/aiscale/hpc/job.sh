# What a launcher does besides training. `eval "$(python -m aiscale.hpc.job)"` defines it.
#
#   job begin [FOLDER] prints the banner; ends a job that was restarted too often; makes RUNS; sends ENVIRONMENT.tar.gz
#                      to every node's FOLDER, and uses it from there
#   job doctor OPTIONS checks nodes and network on the job's ranks
#   job end STATUS     prints what the job cost; with CHAIN=1 requeues one that was stopped and has made progress.
#                      It is called by itself when the file ends
#   job engines PER_NODE OPTIONS   ranks for a notebook outside the job
#
# OPTIONS are srun's. It reads RUNS, ENVIRONMENT, and the array `python` (words that start Python).
# AISCALE_DOCTOR=strict ends a job that is not ready to train, AISCALE_DOCTOR=off does not look; CHAIN=1 and RESTARTS
# allow a job to requeue itself.
#
# Two files in RUNS keep what one start must tell the next:
#   .chain-NAME   a line for each start: job, restart, when it began (s), seconds, step saved, how it ended
#   .hung-nodes   a line for each node of a start that hung: job, restart, node
# shellcheck shell=bash disable=SC2154  # python is the launcher's

job() {
  local what="$1"
  shift
  "job_$what" "$@"
}

job_say() { echo "job: $*" >&2; }

job_begin() { # job_begin [FOLDER]
  export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 # jobs download nothing
  job_restart="${SLURM_RESTART_COUNT:-0}" job_began="${SLURM_JOB_START_TIME:-$(date +%s)}" job_nodes="${SLURM_NNODES:-1}"
  job_chain="$RUNS/.chain-${SLURM_JOB_NAME:-job}"
  export AISCALE_NOTE_SAVED="$RUNS/.saved-$SLURM_JOB_ID" # `aiscale train` writes there what it saved, and how it ended
  mkdir -p "$RUNS"
  touch "$job_chain"
  job_close_last
  if [ "$job_restart" = 0 ] && [ "${CHAIN:-0}" != 1 ]; then : > "$job_chain"; fi # each one stands for itself
  local cap="${RESTARTS:-5}" starts node
  starts="$(wc -l < "$job_chain")"
  if [ "$starts" -lt "$job_restart" ]; then starts="$job_restart"; fi
  {
    echo "=== ${SLURM_JOB_NAME:-job}, job $SLURM_JOB_ID, $(date '+%F %T %Z'), restart $job_restart of at most $cap"
    echo "=== nodes: ${SLURM_JOB_NODELIST:-$HOSTNAME}; QOS: ${SLURM_JOB_QOS:-unknown}; step saved last: $(job_last_step)"
    echo "=== price so far: $(job_price)"
  } >&2
  if [ "$starts" -gt "$cap" ]; then
    job_say "$starts starts before this one, and at most 1 + $cap are allowed: it ends here." \
      "To go on: RESTARTS=$((starts + cap)), or remove $job_chain"
    exit 1
  fi
  if [ "${CHAIN:-0}" = 1 ] && job_stuck; then
    job_say "two starts in a row made no progress: it ends here. Look at their output, then remove $job_chain"
    exit 1
  fi
  echo "$SLURM_JOB_ID $job_restart $job_began 0 - running" >> "$job_chain"
  for node in $(job_bad_nodes); do
    if scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -qx "$node"; then
      job_say "warning: jobs hung on $node twice, and this one has it again; leave it out: sbatch --exclude=$node"
    fi
  done
  # A job that is cancelled ends at once: nothing may put it back into the queue.
  trap 'trap - EXIT; exit 143' TERM
  trap 'job_end $?' EXIT
  if [ $# -gt 0 ]; then job_unpack "$1"; fi
}

# The last start of this job may have ended with its node, without saying so: it lasted at least until it saved.
job_close_last() {
  if [ "$(awk 'END { print $1, $6 }' "$job_chain")" = "$SLURM_JOB_ID running" ]; then
    job_close "$(stat -c %Y "$AISCALE_NOTE_SAVED" 2> /dev/null || echo 0)"
  fi
  rm -f "$AISCALE_NOTE_SAVED"
}

job_close() { # job_close SECONDS_SINCE_1970: completes the last line of .chain-NAME
  local step how=ended
  step="$(sed -n 's/.*step_0*\([0-9][0-9]*\)$/\1/p' "$AISCALE_NOTE_SAVED" 2> /dev/null | tail -n 1)" || true
  if grep -qsx stopped "$AISCALE_NOTE_SAVED"; then how=stopped; fi
  if grep -qs '^hung' "$AISCALE_NOTE_SAVED"; then how=hung; fi
  awk -v now="$1" -v step="${step:--}" -v how="$how" 'NR > 1 { print line } { line = $0 }
    END { split(line, w, " "); s = now - w[3]; print w[1], w[2], w[3], (s > 0 ? s : 0), step, how }' \
    "$job_chain" > "$job_chain.new"
  mv "$job_chain.new" "$job_chain"
  if [ "$how" = hung ]; then job_note_nodes; fi
}

# The nodes of the ranks that did not arrive, or all nodes of the job where nobody knows which those were.
job_note_nodes() {
  local start
  start="$(awk 'END { print $1, $2 }' "$job_chain")"
  local node named
  named="$(sed -n 's/^hung //p' "$AISCALE_NOTE_SAVED" | tr ' ' '\n' | sort -u)"
  for node in ${named:-$(scontrol show hostnames "$SLURM_JOB_NODELIST")}; do
    echo "$start $node" >> "$RUNS/.hung-nodes"
  done
}

job_bad_nodes() { # on which a hang recurred
  if [ -e "$RUNS/.hung-nodes" ]; then sort -u "$RUNS/.hung-nodes" | awk '++n[$3] == 2 { print $3 }'; fi
}

job_last_step() { awk '$5 != "-" { s = $5 } END { print s == "" ? "none" : s }' "$job_chain"; }

# Whether neither of the last two starts has saved a later step than those before them.
job_stuck() {
  awk '{ p = ($5 != "-" && $5 + 0 > best); if (p) best = $5 + 0; idle = p ? 0 : idle + 1 } END { exit !(idle >= 2) }' \
    "$job_chain"
}

job_price() { # job_price [last]: what all starts cost that have ended, or only the last one
  awk -v only="${1:-}" -v n="$job_nodes" -v c="${job_charge:-1}" -v u="${job_unit:-node-hours}" '
    { s = (only == "" ? s : 0) + $4 }
    END { printf "%.3f node-hours", n * s / 3600
          if (c != 1 || u != "node-hours") printf " (%.3f %s)", n * s * c / 3600, u }' "$job_chain"
}

job_unpack() {
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

job_doctor() {
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

job_end() {
  local how
  trap - EXIT # once
  job_close "$(date +%s)"
  job_say "price of this start: $(job_price last); of all: $(job_price)"
  how="$(awk 'END { print $6 }' "$job_chain")"
  rm -f "$AISCALE_NOTE_SAVED"
  if [ "$1" = 0 ]; then
    rm -f "$job_chain"
  elif [ "$how" != ended ] || [ "$1" = 130 ] || [ "$1" = 76 ]; then # stopped in time, or hung
    job_again
  fi
}

# Put the job back into the queue, if that was asked for and is not a mistake.
job_again() {
  local where bad
  where="stopped; step saved last: $(job_last_step)"
  if [ "${CHAIN:-0}" != 1 ]; then
    job_say "$where. To go on, submit the file again; with CHAIN=1 sbatch --requeue it would do so by itself"
  elif [[ " ${job_unchained:-debug} " == *" ${SLURM_JOB_QOS:-unknown} "* ]]; then
    job_say "$where. QOS $SLURM_JOB_QOS forbids chains of jobs: to go on, submit the file again"
  elif [ "$job_restart" -ge "${RESTARTS:-5}" ]; then
    job_say "$where. It was restarted $job_restart times, the most that RESTARTS allows: to go on, submit it again"
  elif job_stuck; then
    job_say "$where. Two starts in a row made no progress, so this is the last. Look at the output before another"
  else
    bad="$(job_bad_nodes | paste -sd,)"
    trap '' TERM # requeuing ends this script, which is not done
    if [ -z "$bad" ]; then
      scontrol requeue "$SLURM_JOB_ID" || job_say "Slurm refused to requeue it: submit with CHAIN=1 sbatch --requeue"
    elif scontrol requeuehold "$SLURM_JOB_ID"; then
      job_say "requeued without $bad, where jobs hung twice ($RUNS/.hung-nodes)"
      scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$bad" || job_say "Slurm did not exclude $bad"
      scontrol release "$SLURM_JOB_ID"
    fi
  fi
}

job_engines() {
  local count="${AISCALE_RANKS:-$((SLURM_NNODES * $1))}" folder="${AISCALE_FOLDER:?is unset: cluster.start submits this file}" died late
  shift
  trap - TERM
  rm -f "$job_chain" # engines end with their notebook, and nothing goes on from them
  local step=("$@" --ntasks="$count" --ntasks-per-node="$(((count + SLURM_NNODES - 1) / SLURM_NNODES))")
  umask 077 # the folder has the key by which controller, engines and notebook know each other
  # The notebook's watchman touches `alive` every minute, unless the login node has taken it along. It removes the
  # folder in the end, also if Slurm did not let it cancel this job. Two looks, for a file system may be away for a
  # moment.
  (
    late=0
    while sleep 60; do
      if [ -n "$(find "$folder/alive" -mmin -10)" ]; then late=0; else late=$((late + 1)); fi
      if [ "$late" -ge 2 ]; then scancel "$SLURM_JOB_ID" || true; fi
    done
  ) > /dev/null 2>&1 &
  # shellcheck disable=SC2064  # the process of now
  trap "kill $! || true" EXIT
  # Rank 0 runs the controller beside itself: it listens beyond loopback, and only as long as the job lasts.
  until srun --kill-on-bad-exit=1 "${step[@]}" "${python[@]}" -m aiscale.cluster "$folder" "$count" slurm; do
    echo "srun has ended"
    # A rank has died. The notebook may ask for new ones, which then need not wait in the queue; but nodes do not idle
    # for longer than AISCALE_IDLE seconds.
    died="$SECONDS"
    until [ -e "$folder/again" ]; do
      if [ ! -d "$folder" ] || [ "$((SECONDS - died))" -ge "${AISCALE_IDLE:-600}" ]; then exit 1; fi
      sleep 1
    done
    rm "$folder/again"
    echo "new ranks"
  done
}
