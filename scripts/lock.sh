#!/usr/bin/env bash
# Writes requirements.lock anew from pyproject.toml, keeping every version that still fits: `make lock`.
#
#   scripts/lock.sh                   requirements.lock, for laptops and for sites that have no lock of their own
#   scripts/lock.sh --site frontier   launchers/frontier/requirements.lock: the Python and the torch of that site's
#                                     profile (also perlmutter), without what only laptops and tests need
#
# uv resolves for Pythons and systems other than this one, which pip cannot. What only some torch builds bring with
# them (the CUDA libraries and triton) is left out, so that one lock serves CPU, CUDA and ROCm builds.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${AISCALE_PYTHON:-.venv/bin/python}

case "${1:-}" in
  "") site="" lock=requirements.lock ;;
  --site) site="${2:-}" lock="launchers/${2:-}/requirements.lock" ;;
esac
if [ $# -gt 2 ] || { [ $# -gt 0 ] && [ -z "${site:-}" ]; }; then
  echo "lock: what is $*? scripts/lock.sh, or scripts/lock.sh --site frontier" >&2
  exit 2
fi

"$python" -m pip install --quiet uv
uv="$(dirname "$python")/uv"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
resolved=$work/lock
touch "$work/constraints"
if [ -z "$site" ]; then
  options=(--universal --python-version 3.11 --all-extras)
else
  read -r wanted torch < <("$python" -c '
import sys
from aiscale.sites import find
place = find(sys.argv[1])
print(place.build.python, place.build.torch)' "$site")
  [ -n "${torch:-}" ] || { echo "lock: the profile of $site has no [build] with python and torch" >&2; exit 2; }
  options=(--python-version "$wanted" --python-platform x86_64-manylinux_2_28 --extra data --extra eval)
  echo "torch==$torch" > "$work/constraints"
fi
# What the lock has now is kept where it fits; a site's begins with everybody's.
if [ -z "$site" ]; then
  cp requirements.lock "$resolved"
else
  mkdir -p "$(dirname "$lock")"
  if [ -f "$lock" ]; then grep -v '^torch==' "$lock"; else grep -v '^torch==' requirements.lock; fi > "$resolved"
fi

"$uv" pip compile --quiet "${options[@]}" --constraints "$work/constraints" --no-annotate --no-header \
  pyproject.toml --output-file "$resolved"
{
  if [ -n "$site" ]; then
    echo "# The exact versions that launchers/$site/build_environment.sh installs, for Python $wanted. Written by"
    echo "# \`scripts/lock.sh --site $site\`. The libraries that a torch build brings with it are not listed."
  else
    sed -n '/^#/p' requirements.lock
  fi
  grep -vE "^(nvidia|cuda|triton)-?|== '(win32|nt|emscripten)'" "$resolved" \
    | sed -E "s/ ; sys_platform != 'emscripten'( and sys_platform != 'win32')?$//; s/ ; os_name != 'nt'.*$//"
} > "$lock.new"
mv "$lock.new" "$lock"
