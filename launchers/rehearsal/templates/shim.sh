#!/bin/bash
# A program that a site has: records the call, then does what the real one would as far as this machine can.
source "@folder@/etc/bash_env.sh"
name="$(basename "$0")"
rehearsal_record "$name" "$@"
shims="@folder@/shims:"  # in a variable, since its slashes would end the pattern
PATH="${PATH//"$shims"/}:${shims%:}" # behind the real programs, and behind those that a job had put first
if [[ "$name" =~ ^(shifter|singularity|apptainer|podman-hpc)$ ]]; then # the container is this machine
  [ "$name" = shifter ] || { [[ "$1" =~ ^(run|exec)$ ]] || exit 0; shift; }
  while [[ "$1" == -* ]]; do shift; done
  [ "$name" = shifter ] || shift # the image
  exec "$@"
fi
if [ "$name" = srun ]; then # for task_prolog.sh: Slurm does not tell it
  words=()
  for word in "$@"; do
    [[ "$word" == --gpu-bind=* ]] && export SLURM_GPU_BIND="${word#*=}"
    [[ "$word" == --container-* ]] || words+=("$word") # Pyxis' options
  done
  set -- "${words[@]}"
fi
# There is no database: what it would say is in a file, whose first row names the columns.
if [ "$name" = sacctmgr ] || [ "$name" = sshare ]; then
  table=share columns=Account,User
  case "$*" in *"show qos"*) table=qos ;; *"show assoc"*) table=assoc ;; esac
  for word in "$@"; do [[ "$word" =~ ^(--)?format=(.*) ]] && columns="${BASH_REMATCH[2]}"; done
  exec awk -F'|' -v columns="$columns" 'NR == 1 { for (i = 1; i <= NF; i++) at[tolower($i)] = i; next }
    { n = split(columns, name, ","); row = ""
      for (i = 1; i <= n; i++) row = row (i > 1 ? "|" : "") $(at[tolower(name[i])])
      print row }' "@folder@/etc/$table"
fi
real="$(type -P "$name")"
if [ "$real" != "@folder@/shims/$name" ]; then exec "$real" "$@"; fi
if [ "$name" = pigz ]; then exec gzip "$@"; fi
exit 0
