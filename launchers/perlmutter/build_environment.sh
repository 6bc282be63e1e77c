#!/bin/bash
# The environment of Perlmutter (NERSC): Python 3.12, torch 2.13.0, and the versions of requirements.lock
#
#   build_environment.sh PREFIX                    builds it there, on a login node
#   build_environment.sh --download DIR            only fetches what it takes into DIR, where there is a network
#   build_environment.sh --wheelhouse DIR PREFIX   builds it from DIR, without a network
#
# PREFIX belongs on /global/common/software/<project>, made for software: compute nodes read it
# fast, and cannot write to it.
#
# One serves a whole class: when it is built nobody can write to it, and who may enter the folder that it is in may use
# it. Jobs find it by `export AISCALE_ENVIRONMENT=PREFIX` before sbatch. To change it, build another beside it, for jobs
# may be running in this one. To remove it: chmod -R u+w PREFIX, then rm -r PREFIX.
#
# Rendered by `aiscale launchers`; README.md beside it gives reasons and sources.

set -eo pipefail  # no -u: scripts of modules and conda break under it
umask 022         # readable for all who may enter, writable for nobody else

say() { printf 'environment: %s\n' "$*" >&2; }
fail() {
  say "$*"
  exit 1
}

# What is asked for ------------------------------------------------------------------------------------------------
usage() { awk 'NR > 1 && /^#/ { sub(/^# ?/, ""); print; next } NR > 1 { exit }' "$0"; }
MODE=build PREFIX="" WHEELHOUSE=""
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help)
      usage
      exit ;;
    --download | --wheelhouse)
      [ -n "${2:-}" ] || fail "$1 needs a folder after it"
      case "$1" in
        --download) MODE=download WHEELHOUSE="$2" ;;
        --wheelhouse) MODE=offline WHEELHOUSE="$2" ;;
      esac
      shift ;;
    -*) fail "unknown option $1: see build_environment.sh --help" ;;
    *)
      [ -z "$PREFIX" ] || fail "where should it be, in $PREFIX or in $1? Name one folder"
      PREFIX="$1" ;;
  esac
  shift
done

# aiscale itself, and the lock that lies beside this file, or the one that serves everywhere.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
SOURCE="${AISCALE_SOURCE:-$(cd "$here/../.." && pwd)}"
grep -qs '^name = "aiscale"' "$SOURCE/pyproject.toml" ||
  fail "$SOURCE is no checkout of aiscale: name yours in AISCALE_SOURCE"
LOCK="$here/requirements.lock"
[ -f "$LOCK" ] || LOCK="$SOURCE/requirements.lock"
locked() { sed -nE "s/^$1==([^ ;]+).*/\1/p" "$LOCK"; } # the version of a package
TORCH="$(locked torch)"

if [ -n "$WHEELHOUSE" ] && [ "$MODE" = download ]; then
  [ -z "$PREFIX" ] || fail "--download only fetches: leave $PREFIX out"
  mkdir -p "$WHEELHOUSE"
elif [ -n "$WHEELHOUSE" ]; then
  ls "$WHEELHOUSE"/*.whl > /dev/null 2>&1 ||
    fail "there are no wheels in $WHEELHOUSE: fill it where there is a network," \
      "by --download $(printf %q "$WHEELHOUSE")"
fi
if [ -n "$WHEELHOUSE" ]; then WHEELHOUSE="$(cd "$WHEELHOUSE" && pwd)"; fi
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
if [ "$MODE" = download ]; then PREFIX="$work/env"; fi # wheels are made with the Python that will use them
[ -n "$PREFIX" ] || fail "where should it be? Name a folder: build_environment.sh PREFIX"
PREFIX="$(realpath -m "$PREFIX")"
# An environment cannot be moved, so it is built in its place; a mark beside it says that it is not whole yet.
if [ -e "$PREFIX" ]; then
  [ -e "$PREFIX.unfinished" ] || fail "$PREFIX is there already, and jobs may be using it: name another folder"
  say "beginning $PREFIX anew, which was not finished"
  rm -rf "$PREFIX"
fi
mkdir -p "$(dirname "$PREFIX")"
touch "$PREFIX.unfinished"
LOG="$PREFIX.log"
if [ "$MODE" = download ]; then LOG="$WHEELHOUSE/download.log"; fi

# Python -----------------------------------------------------------------------------------------------------------
# What lies in a home directory must not stand in for what this environment is to have.
export PYTHONNOUSERSITE=1 PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
export PIP_NO_CACHE_DIR=1 CONDA_PKGS_DIRS="${WHEELHOUSE:-$work}/conda" # caches would fill a home directory's quota
unset PYTHONPATH
module load pytorch/2.13.0  # Python 3.12 and torch for CUDA 13; the launchers load the same

say "1 of 5: Python 3.12 (what is done is written to $LOG)"
{
  # It sees the module's packages, torch among them; requirements.lock goes before them.
  python3 -m venv --system-site-packages "$PREFIX"
} > "$LOG" 2>&1 || fail "Python was not installed: $(grep -E '[Ee]rror' "$LOG" | tail -n 1); see $LOG"
python="$PREFIX/bin/python"
version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
[ "$version" = 3.12 ] ||
  fail "this Python is $version, and requirements.lock is for 3.12: load the modules that this file names"

# Packages ---------------------------------------------------------------------------------------------------------
get() { # get WORDS...   what pip shall install; or only fetch, made into wheels where it comes as source
  case "$MODE" in
    build) "$python" -m pip install "$@" ;;
    download) "$python" -m pip wheel --wheel-dir "$WHEELHOUSE" --find-links "$WHEELHOUSE" "$@" ;;
    offline) "$python" -m pip install --no-index --find-links "$WHEELHOUSE" "$@" ;;
  esac >> "$LOG" 2>&1 || failed
}
failed() {
  if [ "$MODE" != offline ] && grep -qE 'from versions: none|Failed to establish|NameResolution' "$LOG"; then
    fail "no package index answers: is this a login node? Without a network: --wheelhouse DIR, which" \
      "--download DIR fills; see $LOG"
  fi
  # In pip's own words, or those of the compiler or script that it ran.
  local why
  why="$(grep -oE 'ERROR: .*' "$LOG" || grep -oE '[A-Za-z]*[Ee]rror: .*' "$LOG" || true)"
  fail "pip failed: ${why%%$'\n'*}; see $LOG"
}

say "2 of 5: torch $TORCH, the module's"
found="$("$python" -c 'import torch; assert torch.version.cuda; print(torch.__version__)' 2>> "$LOG")" ||
  fail "this torch is not one for this machine (torch.version.cuda does not hold), or cannot be imported; see $LOG"
[ "${found%%+*}" = "$TORCH" ] ||
  fail "torch is $found, and requirements.lock is for $TORCH: load the module that has it"

grep -vE '^(#|torch==|mpi4py==|mpich==)' "$LOCK" > "$work/rest.txt"
say "3 of 5: $(wc -l < "$work/rest.txt") packages of requirements.lock"
get --no-deps -r "$work/rest.txt"

say "4 of 5: mpi4py $(locked mpi4py), against the site's MPI"
# They would link libraries for GPUs and for traces of I/O into mpi4py.
module unload darshan craype-accel-nvidia80
source_only=(--no-binary=mpi4py --no-cache-dir) # a wheel from elsewhere is made for another MPI
if [ "$MODE" = offline ]; then source_only=(); fi
MPICC="cc -shared" get --no-deps "${source_only[@]}" "mpi4py==$(locked mpi4py)"

if [ "$MODE" = download ]; then
  rm -f "$PREFIX.unfinished"
  say "done: $(find "$WHEELHOUSE" -name '*.whl' | wc -l) wheels in $WHEELHOUSE; now, also without a network:" \
    "build_environment.sh --wheelhouse $(printf %q "$WHEELHOUSE") PREFIX"
  exit
fi

say "5 of 5: aiscale"
# From a copy: pip writes beside what it builds. Not editable, so that later changes of the checkout change no job.
mkdir "$work/aiscale"
cp -R "$SOURCE/pyproject.toml" "$SOURCE/README.md" "$SOURCE/LICENSE" "$SOURCE/src" "$work/aiscale"
get --no-deps --no-build-isolation "$work/aiscale"
"$python" -c 'import aiscale, mpi4py' 2>> "$LOG" || fail "aiscale cannot be imported there; see $LOG"

# What it was made of, for those who use it.
{
  echo "perlmutter, $(date +%F), Python $("$python" -c 'import platform; print(platform.python_version())')"
  echo "requirements.lock $(cksum < "$LOCK")"
  echo "aiscale $(git -C "$SOURCE" describe --always --dirty 2> /dev/null || echo of no commit)"
  "$python" -m pip list --format=freeze
} > "$PREFIX/aiscale-environment.txt" 2>> "$LOG"
chmod -R a-w "$PREFIX"
rm -f "$PREFIX.unfinished"
say "done in $((SECONDS / 60)) min $((SECONDS % 60)) s. To use it:" \
  "export AISCALE_ENVIRONMENT=$(printf %q "$PREFIX")"
