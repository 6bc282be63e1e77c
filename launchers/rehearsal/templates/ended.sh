#!/bin/bash
# Run by slurmctld when a job has ended. A requeued one would wait until the credential of its first run has expired,
# at a site two minutes: here it may start at once.
export SLURM_CONF="@folder@/etc/slurm.conf"
again() {
  for _ in {1..600}; do # then it starts by itself
    sleep 0.1
    case "$(scontrol --oneliner show job "$SLURM_JOB_ID")" in
      "") ;; # no answer
      *JobState=COMPLETING* | *JobState=RUNNING* | *JobState=SIGNALING* | *JobState=REQUEUED*) ;; # not put back yet
      *JobState=PENDING*Reason=JobHeld*) return ;;
      *JobState=PENDING*) # a credential of the second in which the last one was revoked is taken for that one
        sleep 1.1
        scontrol update jobid="$SLURM_JOB_ID" StartTime=now && return ;;
      *) return ;;
    esac
  done
}
export -f again
setsid bash -c again < /dev/null > /dev/null 2>&1 & # slurmctld ends what is left of this script's group
exit 0
