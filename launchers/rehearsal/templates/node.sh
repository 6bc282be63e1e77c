#!/bin/bash
# node.sh NAME FOLDER NVME SHARED...   in namespaces of its own: becomes the virtual node NAME and starts its slurmd.
# Of /tmp a node sees its own, and those folders of the machine's that are SHARED, so that what lies there still runs.
set -euo pipefail
name=$1 folder=$2 nvme=$3
shift 3
hostname "$name"
mkdir -p "$folder/spool/$name" "$folder/tmp/$name"
chmod 1777 "$folder/tmp/$name"
if [ -n "$nvme" ]; then mount -t tmpfs none "$nvme"; fi
mount -t tmpfs none /dev/shm # MPI's shared memory, as on a node of its own
for device in "$folder"/dev/gpu*; do # Slurm wants character devices
  if [ -e "$device" ]; then mount --bind /dev/null "$device"; fi
done
for shared in "$@"; do
  mkdir -p "$folder/tmp/$name/${shared#/tmp/}"
  mount --rbind "$shared" "$folder/tmp/$name/${shared#/tmp/}"
done
mount --rbind "$folder/tmp/$name" /tmp
cd /
exec slurmd -N "$name"
