#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=1  # three replicas and a spare node
#SBATCH --no-kill  # a dead node does not end the job
# Replicas on the nodes of a job. If an agent ends with its node, another starts on a node that is free:
#   sbatch keep_going.sh 3 train_elastic.py --steps 60
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:?name the network card, such as hsn0}
replicas=$1 meet=${MEET:-$SLURM_SUBMIT_DIR/meet-$SLURM_JOB_ID}  # on a file system that all nodes see
shift
mkdir -m 700 "$meet"
for ((n = 0; n < replicas; n++)); do
  # srun's status does not tell: it may be 0 when a node has died. An error of the script comes again and again.
  for ((tries = 0; tries < 5; tries++)); do
    if [ -e "$meet/over-$n" ]; then break; fi
    srun --nodes=1 --ntasks=1 --exact --kill-on-bad-exit=0 bash -c 'python keep_going.py "${@:2}" && touch "$1"' \
      agent "$meet/over-$n" --replicas "$replicas" --only "$n" --meet "$meet" "$@"
    sleep 1
  done &
done
wait
