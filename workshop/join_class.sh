#!/bin/bash
# Joins a class at a computing centre: each participant runs it once, in the hub's terminal or on a login node.
#
#   bash /path/to/class/aiscale/workshop/join_class.sh
#
# It makes a folder of your own, with copies of lessons and exercises, a link to the class's corpora, and class.sh for
# terminals (`source class.sh`); and a Jupyter kernel, which brings the same variables into notebooks, and SHARE, which
# launchers in a terminal must not get. Run again, it adds what is new and leaves what you have changed.

# EDIT: the instructor, once, in the shared copy. Where a line keeps ${NAME:-...}, a participant's own NAME wins -----
SITE="${AISCALE_SITE:-frontier}"                    # frontier, perlmutter, lumi, odo, or a profile of your own (.toml)
ENVIRONMENT="${AISCALE_ENVIRONMENT:-/path/to/env}"  # of all, read-only: what build_environment.sh made
ACCOUNT="${SBATCH_ACCOUNT:-}"                       # which pays for the class; at Perlmutter without _g
RESERVATION="${SBATCH_RESERVATION:-}"               # nodes set aside for it, if any
MINUTES=30                                          # of a participant's job
CORPORA="${AISCALE_CORPORA:-}"                      # a folder with what `aiscale data prepare` made, if any
SHARE="${AISCALE_SHARE:-}"                          # of notebooks: SBATCH_QOS=NAME SBATCH_CONSTRAINT=NAME, if nodes are shared
# --------------------------------------------------------------------------------------------------------------------

set -euo pipefail
fail() { echo "join_class: $*" >&2 && exit 1; }
tree="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
[ -n "$ACCOUNT" ] || fail "no account: the instructor enters it in ${BASH_SOURCE[0]}, or export SBATCH_ACCOUNT=YOURS"
[ -e "$ENVIRONMENT/bin/python" ] || [ -L "$ENVIRONMENT/bin/python" ] ||
  fail "$ENVIRONMENT has no bin/python: export AISCALE_ENVIRONMENT=FOLDER, or ask the instructor"
[ ! -w "$ENVIRONMENT/bin" ] || echo "join_class: you can write to $ENVIRONMENT; its owner: chmod -R a-w" >&2

# Where a folder is fast and all nodes see it; where few ranks may have a part of a node (not on Frontier and Odo).
python=("$ENVIRONMENT/bin/python") engines=slurm
case "$SITE" in
  frontier) place="${MEMBERWORK:?is unset}/${ACCOUNT,,}" ;;
  odo) place="/gpfs/wolf2/olcf/${ACCOUNT,,}/scratch/$USER" ;;
  perlmutter) # parts of CPU nodes, since lessons start their ranks on CPUs; SBATCH_QOS=shared alone: two GPUs at most
    place="${SCRATCH:?is unset}" SHARE="${SHARE:-SBATCH_QOS=shared SBATCH_CONSTRAINT=cpu}" ;;
  lumi) # in a container, where there is no sbatch: ranks in the job that the web interface has started
    place="/scratch/$ACCOUNT/$USER" engines=local
    python=(singularity run "${AISCALE_SIF:?is unset: export the container of the environment}" "${python[@]}") ;;
  *) place="$HOME" ;;
esac
mine="${AISCALE_CLASS:-$place/aiscale-class}" # AISCALE_CLASS=FOLDER: elsewhere
mkdir -p "$mine" || fail "$mine cannot be made: export AISCALE_CLASS=FOLDER, which all nodes see"
cd "$mine"

new=0
while IFS= read -r file; do
  [ -e "$file" ] || { mkdir -p "${file%/*}" && cp "$tree/$file" "$file" && chmod u+w "$file" && new=$((new + 1)); }
done < <(cd "$tree" && find notebooks workshop/exercises workshop/clinic workshop/puzzles workshop/your_own -type f \
  ! -path '*/.*' ! -path '*/__pycache__/*' ! -path '*/progress/*')
ln -sfn "$tree/workshop/graders" workshop/graders
if [ -n "$CORPORA" ]; then ln -sfn "$CORPORA" corpora; fi

variables=("AISCALE_SITE=$SITE" "AISCALE_ENVIRONMENT=$ENVIRONMENT" "AISCALE_ENGINES=$engines" "SBATCH_ACCOUNT=$ACCOUNT"
  "SBATCH_TIMELIMIT=$MINUTES" "AISCALE_RUNS=$mine/runs")
if [ -n "$RESERVATION" ]; then variables+=("SBATCH_RESERVATION=$RESERVATION"); fi
{
  for each in "${variables[@]}"; do printf 'export %q\n' "$each"; done
  # shellcheck disable=SC2016  # for the shell that sources it
  echo 'export PATH="$AISCALE_ENVIRONMENT/bin:$PATH"'
} > class.sh
read -ra share <<< "$SHARE"
variables+=("${share[@]}") # for cluster.start, whose ranks need a part of a node
"${python[@]}" -m aiscale kernel install --site "$SITE" --environment "$ENVIRONMENT" --name aiscale-class \
  --display-name "aiscale, class" "${variables[@]/#/--env=}" > /dev/null
echo "$mine: $new new files. In JupyterLab open it and choose the kernel 'aiscale, class'; in a terminal: source class.sh"
