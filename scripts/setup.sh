#!/usr/bin/env bash
# Makes .venv with the exact versions of requirements.lock and aiscale, editable. `make` calls it before every target
# that needs Python; when nothing has changed since it last succeeded, it ends within milliseconds.
#
#   scripts/setup.sh                      everything; `scripts/setup.sh lessons` what the notebooks need, half of it
#   PYTHON=python3.12 scripts/setup.sh    another interpreter (3.11 to 3.13)
#   TORCH=cuda scripts/setup.sh           a build of torch: cpu (chosen where no NVIDIA GPU is seen), cuda, rocm, the
#                                         address of a package index; a version; TORCH="cpu 2.12.1"; default
#   TORCH=site MPI=site scripts/setup.sh  the torch that a module of this site has loaded; the site's MPI, no mpich
set -euo pipefail
cd -P "$(dirname "$0")/.."
# The builds of the torch of requirements.lock: github.com/pytorch/pytorch/blob/main/RELEASE.md, row 2.13.
PYTORCH=${PYTORCH_INDEX:-https://download.pytorch.org/whl} CUDA=cu130 ROCM=rocm7.2

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }
fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2> /dev/null; }
pip() { TMPDIR=$PWD/.venv/tmp .venv/bin/python -m pip --disable-pip-version-check --no-input "$@"; } # /tmp may be small

what=${1:-everything}
for name in PYTHON TORCH MPI; do # a choice holds until another is made
  if [ -z "${!name-}" ]; then printf -v $name '%s' "$(cat .venv/.aiscale-$name 2> /dev/null || true)"; fi
done
if [ "$TORCH" = default ]; then TORCH=; fi
base="$PWD|$PYTHON|$([ "$TORCH" != site ] || echo site)" # what .venv itself depends on; it does not survive being moved
wanted=$({ cat pyproject.toml requirements.lock scripts/setup.sh; echo "$base|$TORCH|$MPI"; } | cksum)
is_done() { [ -x .venv/bin/aiscale ] && grep -qsxF "$wanted" .venv/.aiscale-stamp ".venv/.aiscale-stamp-$what"; }

if is_done; then exit 0; fi
if command -v flock > /dev/null; then # macOS has none
  exec 9>> pyproject.toml # a file that is there; nothing is written into it
  flock -n 9 || { say "another set-up is at work in this folder: waiting until it is done"; flock 9 || true; }
  if is_done; then exit 0; fi
fi

if [ "$(cat .venv/.aiscale-base 2> /dev/null)" != "$base" ] || ! fits .venv/bin/python; then
  set -- python3.11 python3.12 python3.13 python3
  if [ "$TORCH" = site ]; then set -- python3; fi # a module puts its own first
  if [ -n "$PYTHON" ]; then set -- "$PYTHON"; fi
  while [ $# -gt 0 ] && ! fits "$1"; do shift; done
  [ $# -gt 0 ] || fail "no Python 3.11, 3.12 or 3.13 here: install one, or name it with PYTHON=/path/to/python3"
  say "making .venv with $("$1" --version)"
  set -- "$1" -m venv --clear
  if [ "$TORCH" = site ]; then set -- "$@" --system-site-packages; fi
  "$@" .venv || fail "install Python's venv module too (Debian: apt-get install python3-venv)"
  echo "$base" > .venv/.aiscale-base
fi
rm -rf .venv/.aiscale-stamp* .venv/tmp
mkdir .venv/tmp
for package in .venv/lib/python3*/site-packages/*.dist-info; do # an interrupted set-up left it half unpacked
  if [ -d "$package" ] && [ ! -f "$package/RECORD" ]; then rm -r "$package"; fi
done

index='' version=$(sed -nE 's/^torch==([^ ;]+).*/\1/p' requirements.lock)
for word in $TORCH; do
  case $word in
    site) ;;
    cpu) index=$PYTORCH/cpu ;;
    cuda) index=$PYTORCH/$CUDA ;;
    rocm) index=$PYTORCH/$ROCM ;;
    *://* | /*) index=$word ;;
    [0-9]*) version=$word ;;
    *) fail "TORCH=$word is none of cpu, cuda, rocm, site, a version, and the address of a package index" ;;
  esac
done
if [ "$TORCH" != site ] && [ "$(cat .venv/.aiscale-built 2> /dev/null)" != "$TORCH|$version" ]; then
  # Without a GPU the build for CPUs: pip's default on Linux brings gigabytes of CUDA.
  if [ -z "$index" ] && [ "$(uname)" = Linux ] && ! nvidia-smi -L 2> /dev/null | grep -q GPU; then
    head="import urllib.request as r; r.urlopen(r.Request('$PYTORCH/cpu/torch/', method='HEAD'), timeout=5)"
    if [ -z "${PIP_NO_INDEX-}" ] && .venv/bin/python -c "$head" 2> /dev/null; then
      index=$PYTORCH/cpu
      say "no NVIDIA GPU here: torch comes in its build for CPUs (TORCH=cuda or TORCH=rocm takes another)"
    else
      say "no NVIDIA GPU here, and $PYTORCH does not answer: torch comes from where pip looks (PyPI's has CUDA: 2.7 GB)"
    fi
  fi
  # The same version of another build would count as installed already.
  if [ -f .venv/.aiscale-built ]; then pip uninstall -q -y torch; fi
  # The lock has all that the build for CPUs needs; the others bring libraries of their own.
  case $index in */cpu) set -- --no-deps ;; *) set -- ;; esac
  if [ -n "$index" ]; then set -- "$@" --index-url "$index"; fi
  say "installing torch $version"
  pip install --no-compile "$@" "torch==$version"
  echo "$TORCH|$version" > .venv/.aiscale-built
fi

left_out='^(#|torch==)'
if [ "$MPI" = site ]; then left_out='^(#|torch==|mpich==)'; fi
if [ "$what" = lessons ]; then last='/^# Beyond the lessons/q'; else last=''; fi
sed "$last" requirements.lock | grep -vE "$left_out" > .venv/rest.txt
total=$(($(wc -l < .venv/rest.txt))) n=0
say "installing $total packages of requirements.lock"
# The lock is complete, and nothing of it may replace the torch that was chosen.
pip install --no-deps --no-compile --progress-bar off -r .venv/rest.txt | while read -r line; do
  case $line in Collecting* | Processing* | Requirement*) printf '\rsetup: %d of %d' $((n += 1)) "$total" >&2 ;; esac
done
echo >&2
# Megatron-Core says that it needs Python 3.12, yet has wheels for 3.11. A lock cannot say that pip may take them.
if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
  megatron=$(sed -nE 's/^(megatron-core==[^ ;]+).*/\1/p' requirements.lock)
  pip install --no-deps --no-compile -q --ignore-requires-python "$megatron"
fi
pip install -q --no-deps --no-build-isolation --editable .
.venv/bin/python -c 'import torch; version = tuple(map(int, torch.__version__.split(".")[:2]))
assert version >= (2, 10), f"torch {torch.__version__} is older than 2.10: choose another with TORCH"'
for name in PYTHON TORCH MPI; do echo "${!name}" > .venv/.aiscale-$name; done
stamp=.venv/.aiscale-stamp-$what
if [ "$what" = everything ]; then
  stamp=.venv/.aiscale-stamp
  .venv/bin/python -m compileall -q -j 0 .venv/lib > /dev/null || true # on all cores; pip compiles on one
fi
echo "$wanted" > "$stamp"
rm -r .venv/tmp
say "done in $SECONDS s"
