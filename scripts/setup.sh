#!/usr/bin/env bash
# Makes .venv with the exact versions of requirements.lock and aiscale, editable. `make` calls it before every target
# that needs Python; when nothing has changed since it last succeeded, it ends within milliseconds.
#
#   scripts/setup.sh                              everything
#   scripts/setup.sh lessons                      what the notebooks need, half of it: `make lab`
#   PYTHON=python3.12 scripts/setup.sh            another interpreter (3.11 to 3.13)
#   TORCH=cpu scripts/setup.sh                    torch's build for CPUs, which is taken where no NVIDIA GPU is seen;
#                                                 cuda and rocm name the others, an address another package index
#   TORCH="cpu 2.12.1" scripts/setup.sh           another version of it (2.10 or newer)
#   TORCH=site scripts/setup.sh                   the torch that a module of this site has already loaded
#   TORCH=default scripts/setup.sh                back to set-up's own choice
#   MPI=site scripts/setup.sh                     no mpich: the site's own MPI serves
set -euo pipefail
cd -P "$(dirname "$0")/.."

VENV=.venv
LOG=$VENV/setup.log
OLDEST_TORCH=2.10
# The builds of the torch of requirements.lock; PYTORCH_INDEX may name a mirror.
# https://github.com/pytorch/pytorch/blob/main/RELEASE.md, row 2.13, read in November 2026.
PYTORCH=${PYTORCH_INDEX:-https://download.pytorch.org/whl}
CUDA=cu130
ROCM=rocm7.2
# Megabytes to download, and on disk once compiled: wheels for Python 3.11 on Linux, installed and measured.
LESSONS_MB="190 915"
EVERYTHING_MB="404 1920"
CPU_MB="192 760"
CUDA_MB="2730 6000" # its wheels' sizes at PyPI; on disk an estimate

WHAT=${1:-everything}
case $WHAT in
  everything) STAMP=$VENV/.aiscale-stamp ;;
  lessons) STAMP=$VENV/.aiscale-stamp-lessons ;;
  *)
    echo "setup: $WHAT is neither 'everything' nor 'lessons'" >&2
    exit 2
    ;;
esac

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

done_before() {
  local stamp
  for stamp in "$STAMP" $VENV/.aiscale-stamp; do # who has everything has what the lessons need
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$WANTED" ] && [ -x $VENV/bin/aiscale ]; then return 0; fi
  done
  return 1
}

# One set-up at a time: the others wait, and find the work done.
alone() {
  command -v flock > /dev/null || return 0 # macOS
  exec 9>> pyproject.toml # a file that is there; nothing is written into it
  if ! flock -n 9 2> /dev/null; then
    say "another set-up is at work in this folder: waiting until it is done"
    flock 9 2> /dev/null || true # a file system without locks
  fi
}

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
  local python package options=()
  if [ "$(remember base '')" = "$BASE" ] && fits $VENV/bin/python; then
    # A package without its list of files is one that an interrupted set-up left half unpacked.
    for package in "$VENV"/lib/python3*/site-packages/*.dist-info; do
      if [ -d "$package" ] && [ ! -f "$package/RECORD" ]; then rm -rf "$package"; fi
    done
    return
  fi
  python=$(find_python)
  say "making $VENV with $("$python" --version)"
  if [ "$TORCH" = site ]; then options+=(--system-site-packages); fi
  # ${options[@]+...}: an empty array is an unbound variable to the bash 3.2 of macOS.
  "$python" -m venv --clear ${options[@]+"${options[@]}"} $VENV > /dev/null ||
    fail "$python cannot make virtual environments: install its venv module (Debian: apt-get install python3-venv)"
  printf '%s' "$BASE" > $VENV/.aiscale-base
}

pip_install() {
  # What pip says on standard error is in the log; explain says it in one line. pip unpacks in TMPDIR, and /tmp is
  # small on many machines; it compiles on one core, where compileall uses all.
  TMPDIR=$PWD/$VENV/tmp $VENV/bin/python -m pip install --log $LOG --retries 2 --disable-pip-version-check --no-input \
    --no-compile "$@" 2> /dev/null || explain
}

# The last words of a failed installation: one line that says what is missing and what to do.
explain() {
  local missing
  missing=$($VENV/bin/python scripts/missing.py requirements.lock)
  if grep -qE 'from versions: none|Failed to establish a new connection|NameResolutionError|Temporary failure' $LOG; then
    fail "$missing not installed, because no package index answers: connect to a network, or point pip at a" \
      "folder of wheels (PIP_FIND_LINKS=DIR PIP_NO_INDEX=1), then run this again"
  fi
  if grep -qE 'No space left|Disk quota exceeded' $LOG; then
    fail "$missing not installed, because the disk or your quota is full: free some ($VENV/bin/pip cache purge) or" \
      "clone into a larger file system, then run this again"
  fi
  fail "$missing not installed: $(grep -oE 'ERROR: .*' $LOG | grep -v 'No matching' | tail -1); see $LOG"
}

# Says what comes, and stops where it does not fit: room DOWNLOAD_MB DISK_MB WHAT
room() {
  local has free need
  free=$(df -Pk . | awk 'NR == 2 {printf "%d", $4 * 1.024 / 1000}')
  has=$(du -sk $VENV | awk '{printf "%d", $1 * 1.024 / 1000}')
  need=$(($2 + 2 * $1 - has)) # a downloaded wheel lies in pip's cache too, and beside what is unpacked from it
  if [ $need -lt "$1" ]; then need=$1; fi
  say "$3: $(gb "$1") to download, $(gb "$need") of disk while it is installed, $(gb "$free") free"
  if [ "$free" -lt "$need" ]; then
    fail "$(gb "$need") of disk are needed in $PWD and $(gb "$free") are free: free some, or clone into a larger file system"
  fi
}
gb() { awk -v mb="$1" 'BEGIN {printf "%.1f GB", mb / 1000}'; }
sum() { echo $(($1 + $3)) $(($2 + $4)); }

sees_nvidia() { nvidia-smi -L 2> /dev/null | grep -q GPU; }
answers() {
  timeout 5 $VENV/bin/python -c "import urllib.request as r; r.urlopen(r.Request('$1', method='HEAD'))" 2> /dev/null
}

# Reads TORCH: BUILD (cpu, cuda, rocm, site, another, or nothing), INDEX and VERSION.
read_torch() {
  local word
  BUILD="" INDEX="" VERSION=$(sed -nE 's/^torch==([^ ;]+).*/\1/p' requirements.lock)
  for word in $TORCH; do
    case $word in
      site) BUILD=site ;;
      cpu) BUILD=cpu INDEX=$PYTORCH/cpu ;;
      cuda) BUILD=cuda INDEX=$PYTORCH/$CUDA ;;
      rocm) BUILD=rocm INDEX=$PYTORCH/$ROCM ;;
      *://* | /*) BUILD=another INDEX=$word ;;
      [0-9]*) VERSION=$word ;;
      *) fail "TORCH=$word is none of cpu, cuda, rocm, site, a version, and the address of a package index" ;;
    esac
  done
}

# Without a GPU the build for CPUs, from PyTorch's own index: pip's default on Linux brings gigabytes of CUDA.
choose_build() {
  if [ -n "$BUILD" ] || [ "$(uname)" != Linux ] || sees_nvidia; then return; fi
  if [ -z "${PIP_NO_INDEX-}" ] && answers "$PYTORCH/cpu/torch/"; then
    BUILD=cpu INDEX=$PYTORCH/cpu
    say "no NVIDIA GPU here: torch comes in its build for CPUs (TORCH=cuda or TORCH=rocm takes another)"
  else
    BUILD=found
    say "no NVIDIA GPU here, and $PYTORCH does not answer: torch comes from where pip looks" \
      "(with CUDA, if that is PyPI: $(gb "${CUDA_MB% *}") to download)"
  fi
}

has_torch() {
  [ "$(cat $VENV/.aiscale-torch 2> /dev/null || echo none)" = "$TORCH" ] &&
    compgen -G "$VENV/lib/python3*/site-packages/torch-$VERSION*.dist-info" > /dev/null
}

install_torch() {
  local options=()
  # The same version of another build would count as installed already.
  if [ -f $VENV/.aiscale-torch ] && [ "$(cat $VENV/.aiscale-torch)" != "$TORCH" ]; then
    $VENV/bin/python -m pip uninstall --quiet --yes torch
  fi
  if [ -n "$INDEX" ]; then options+=(--index-url "$INDEX"); fi
  # The lock has all that the build for CPUs needs; the others bring libraries of their own.
  if [ $BUILD = cpu ]; then options+=(--no-deps); fi
  # First and pinned: without a pin pip would take the newest build and the gigabytes that come with it.
  say "installing torch $VERSION"
  pip_install ${options[@]+"${options[@]}"} "torch==$VERSION"
  printf '%s' "$TORCH" > $VENV/.aiscale-torch
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
  listed | grep -vE "$left_out" > $VENV/rest.txt
  say "installing $(($(wc -l < $VENV/rest.txt))) packages of requirements.lock"
  # The lock is complete, and nothing of it may replace the torch that was chosen.
  pip_install --no-deps --progress-bar off -r $VENV/rest.txt | count "$(wc -l < $VENV/rest.txt)"
  pip_install --quiet --no-deps --no-build-isolation --editable .
}

# The part of the lock that is asked for.
listed() {
  if [ "$WHAT" = lessons ]; then sed '/^# Beyond the lessons/,$d' requirements.lock; else cat requirements.lock; fi
}

# What has a size that is known: torch's build where it is not there yet, and the rest.
say_sizes() {
  local sizes=$EVERYTHING_MB torch="0 0" about=$WHAT
  if [ "$WHAT" = lessons ]; then sizes=$LESSONS_MB about="what the lessons need"; fi
  case $BUILD in
    cpu | found) torch=$CPU_MB ;;
    cuda | "") torch=$CUDA_MB ;;
    rocm | another) about+=", without torch" ;;
  esac
  if [ "$(uname)" = Darwin ]; then torch=$CPU_MB; fi
  # shellcheck disable=SC2046,SC2086
  room $(sum $sizes $torch) "$about"
}

if done_before; then exit 0; fi
[ -w . ] || fail "$PWD cannot be written to: clone it into a folder of your own (git clone \"$PWD\" ~/aiscale)"
alone
if done_before; then exit 0; fi

started=$SECONDS
read_torch
make_venv
rm -rf $VENV/.aiscale-stamp* $LOG $VENV/tmp
mkdir $VENV/tmp
trap 'rm -rf $VENV/tmp' EXIT
if [ "$BUILD" = site ]; then
  say_sizes
  check_torch "load the module that has it (module load pytorch), or leave TORCH=site out"
elif has_torch; then
  BUILD=there
  say_sizes
else
  choose_build
  say_sizes
  install_torch
fi
install_rest
if [ "$BUILD" != site ]; then check_torch "choose another with TORCH"; fi
# Lessons come at once: Python compiles what they import when they do.
if [ "$WHAT" = everything ]; then $VENV/bin/python -m compileall -q -j 0 $VENV/lib > /dev/null || true; fi
printf '%s' "$PYTHON" > $VENV/.aiscale-python
printf '%s' "$TORCH" > $VENV/.aiscale-torch
printf '%s' "$MPI" > $VENV/.aiscale-mpi
printf '%s' "$WANTED" > $STAMP
say "done in $((SECONDS - started)) s"
