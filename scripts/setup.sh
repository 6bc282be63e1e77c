#!/usr/bin/env bash
# Makes .venv with the exact versions of requirements.lock and aiscale, editable. `make` calls it before every target
# that needs Python; when nothing has changed since it last succeeded, it ends within milliseconds.
#
#   scripts/setup.sh
#   PYTHON=python3.12 scripts/setup.sh            another interpreter (3.11 to 3.13)
#   TORCH=ADDRESS scripts/setup.sh                torch from another package index: the small CPU build, ROCm, ...
#   TORCH="ADDRESS 2.12.1" scripts/setup.sh       another version of it (2.10 or newer)
#   TORCH=site scripts/setup.sh                   the torch that a module of this site has already loaded
#   TORCH=default scripts/setup.sh                back to the version of requirements.lock
#   MPI=site scripts/setup.sh                     no mpich: the site's own MPI serves
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv
STAMP=$VENV/.aiscale-stamp
LOG=$VENV/setup.log
OLDEST_TORCH=2.10

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
  say "$*"
  exit 1
}

# What an installation depends on. Choices made once hold until others are given.
remember() {
  local kept=$VENV/.aiscale-$1
  if [ -z "$2" ] && [ -f "$kept" ]; then cat "$kept"; else printf '%s' "$2"; fi
}
PYTHON=$(remember python "${PYTHON-}")
TORCH=$(remember torch "${TORCH-}")
MPI=$(remember mpi "${MPI-}")
if [ "$TORCH" = default ]; then TORCH=; fi
BASE="$PWD|$PYTHON|$([ "$TORCH" != site ] || echo site)" # what .venv itself depends on; it does not survive being moved
WANTED=$({ cat pyproject.toml requirements.lock scripts/setup.sh; printf '%s|%s|%s' "$BASE" "$TORCH" "$MPI"; } | cksum)

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2> /dev/null; }

find_python() {
  local name names="python3.11 python3.12 python3.13 python3"
  if [ -n "$PYTHON" ]; then
    fits "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11 to 3.13: name one that is"
    printf '%s' "$PYTHON"
    return
  fi
  # A module puts its own python3 first; the numbered ones may be the system's.
  if [ "$TORCH" = site ]; then names="python3 $names"; fi
  # A shim of pyenv may be on the path and still not run, so each is tried.
  for name in $names; do
    if fits "$name"; then
      printf '%s' "$name"
      return
    fi
  done
  fail "no Python 3.11, 3.12 or 3.13 on the path: install one (apt-get install python3-venv, module load python," \
    "or conda), or name it with PYTHON=/path/to/python3"
}

make_venv() {
  local python options=()
  if [ "$(remember base '')" = "$BASE" ] && fits $VENV/bin/python; then return; fi
  python=$(find_python)
  say "making $VENV with $("$python" --version)"
  if [ "$TORCH" = site ]; then options+=(--system-site-packages); fi
  # ${options[@]+...}: an empty array is an unbound variable to the bash 3.2 of macOS.
  "$python" -m venv --clear ${options[@]+"${options[@]}"} $VENV > /dev/null ||
    fail "$python cannot make virtual environments: install its venv module (Debian: apt-get install python3-venv)"
  printf '%s' "$BASE" > $VENV/.aiscale-base
}

pip_install() {
  # What pip says on standard error is in the log; explain says it in one line.
  $VENV/bin/python -m pip install --log $LOG --retries 2 --disable-pip-version-check --no-input "$@" 2> /dev/null ||
    explain
}

# The last words of a failed installation: one line that says what is missing and what to do.
explain() {
  local missing
  missing=$($VENV/bin/python scripts/missing.py requirements.lock)
  if grep -qE 'from versions: none|Failed to establish a new connection|NameResolutionError|Temporary failure' $LOG; then
    fail "$missing not installed, because no package index answers: connect to a network, or point pip at a" \
      "folder of wheels (PIP_FIND_LINKS=DIR PIP_NO_INDEX=1), then run this again"
  fi
  fail "$missing not installed: $(grep -oE 'ERROR: .*' $LOG | grep -v 'No matching' | tail -1); see $LOG"
}

torch_version() { sed -nE 's/^torch==([^ ;]+).*/\1/p' requirements.lock; }

install_torch() {
  local word version options=()
  version=$(torch_version)
  if [ "$TORCH" = site ]; then
    check_torch "load the module that has it (module load pytorch), or leave TORCH=site out"
    return
  fi
  for word in $TORCH; do
    case $word in
      *://* | /*) options+=(--index-url "$word") ;;
      [0-9]*) version=$word ;;
      *) fail "TORCH=$word is neither the address of a package index, nor a version, nor 'site'" ;;
    esac
  done
  # The same version from another index would count as installed already.
  if [ -f $VENV/.aiscale-torch ] && [ "$(cat $VENV/.aiscale-torch)" != "$TORCH" ]; then
    $VENV/bin/python -m pip uninstall --quiet --yes torch
  fi
  # First and pinned: without a pin pip would take the newest build and the gigabytes that come with it.
  say "installing torch $version"
  pip_install ${options[@]+"${options[@]}"} "torch==$version"
  check_torch "choose another with TORCH"
}

check_torch() {
  local found
  found=$($VENV/bin/python -c 'import torch; print(torch.__version__)' 2> /dev/null) ||
    fail "this Python ($($VENV/bin/python --version)) cannot import torch: $1"
  if [ "$(printf '%s\n' $OLDEST_TORCH "$found" | sort -V | head -1)" != $OLDEST_TORCH ]; then
    fail "torch $found is older than $OLDEST_TORCH, which aiscale needs: $1"
  fi
}

# Shows how far pip is, on a terminal.
count() {
  local line n=0 total=$(($1))
  while read -r line; do
    case $line in Collecting* | "Requirement already"*) n=$((n + 1)) ;; esac
    if [ -t 2 ]; then printf '\rsetup: %d of %d' $n $total >&2; fi
  done
  if [ -t 2 ]; then printf '\r' >&2; fi
}

install_rest() {
  local left_out='^(#|torch==)'
  if [ "$MPI" = site ]; then left_out='^(#|torch==|mpich==)'; fi
  grep -vE "$left_out" requirements.lock > $VENV/rest.txt
  say "installing $(($(wc -l < $VENV/rest.txt))) packages of requirements.lock"
  # The lock is complete, and nothing of it may replace the torch that was chosen.
  pip_install --no-deps --progress-bar off -r $VENV/rest.txt | count "$(wc -l < $VENV/rest.txt)"
  pip_install --quiet --no-deps --no-build-isolation --editable .
}

if [ -f $STAMP ] && [ "$(cat $STAMP)" = "$WANTED" ] && [ -x $VENV/bin/aiscale ]; then exit 0; fi

started=$SECONDS
make_venv
rm -f $STAMP $LOG
install_torch
install_rest
printf '%s' "$PYTHON" > $VENV/.aiscale-python
printf '%s' "$TORCH" > $VENV/.aiscale-torch
printf '%s' "$MPI" > $VENV/.aiscale-mpi
printf '%s' "$WANTED" > $STAMP
say "done in $((SECONDS - started)) s"
