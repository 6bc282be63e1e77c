# Ranks for a notebook outside the job, which job.sh's `job engines` starts. `cluster.start` submits the launcher
# that calls it; AISCALE_FOLDER is where notebook, controller and ranks meet.
# shellcheck shell=bash disable=SC2154  # python is the launcher's

job_engines() { # job_engines PER_NODE OPTIONS
  local count="${AISCALE_RANKS:-$((SLURM_NNODES * $1))}" folder="${AISCALE_FOLDER:?is unset: cluster.start submits this file}" late
  shift
  trap - TERM
  local step=("$@" --ntasks="$count" --ntasks-per-node="$(((count + SLURM_NNODES - 1) / SLURM_NNODES))")
  umask 077 # the folder has the key by which controller, engines and notebook know each other
  # The notebook's cleaner removes the folder in the end, also if Slurm did not let it cancel this job. Two looks, for a
  # file system may be away for a moment.
  (
    late=0
    while sleep 60; do
      if [ -d "$folder" ]; then late=0; else late=$((late + 1)); fi
      if [ "$late" -ge 2 ]; then scancel "$SLURM_JOB_ID" || true; fi
    done
  ) > /dev/null 2>&1 &
  # shellcheck disable=SC2064  # the process of now
  trap "kill $! || true" EXIT
  # Rank 0 runs the controller beside itself: it listens beyond loopback, and only as long as the job lasts.
  srun --kill-on-bad-exit=1 "${step[@]}" "${python[@]}" -m aiscale.lesson.cluster "$folder" "$count" slurm
}
