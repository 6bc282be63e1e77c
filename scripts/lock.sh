#!/usr/bin/env bash
# Writes requirements.lock anew from pyproject.toml, keeping every version that still fits: `make lock`.
#
#   scripts/lock.sh                   requirements.lock, for laptops and for sites that have no lock of their own
#   scripts/lock.sh --site frontier   launchers/frontier/requirements.lock: the Python and the torch of that site's
#                                     profile (also perlmutter), without what only laptops and tests need; or a
#                                     profile of your own with a table [build]: --site mine.toml
#
# uv resolves for Pythons and systems other than this one, which pip cannot. What only some torch builds bring with
# them (the CUDA libraries and triton) is left out, so that one lock serves CPU, CUDA and ROCm builds.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${AISCALE_PYTHON:-.venv/bin/python}

case "${1:-}" in
  "") site="" lock=requirements.lock ;;
  --site) site="${2:-}" ;;
esac
if [ $# -gt 2 ] || { [ $# -gt 0 ] && [ -z "${site:-}" ]; }; then
  echo "lock: what is $*? scripts/lock.sh, or scripts/lock.sh --site frontier" >&2
  exit 2
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
resolved=$work/lock
touch "$work/constraints"
if [ -z "$site" ]; then
  options=(--universal --python-version 3.11 --all-extras)
else
  found=$("$python" -c '
import sys
from aiscale.hpc.sites import SiteError, find
try:
    place = find(sys.argv[1])
except SiteError as error:
    sys.exit(f"lock: {error}")
if not (place.build.python and place.build.torch):
    sys.exit(f"lock: the profile of {place.name} must say python and torch in a table [build]")
print(place.name, place.build.python, place.build.torch)' "$site") || exit 2
  read -r name wanted torch <<< "$found"
  lock=launchers/$name/requirements.lock
  options=(--python-version "$wanted" --python-platform x86_64-manylinux_2_28 --extra data --extra eval)
  echo "torch==$torch" > "$work/constraints"
fi
# What the lock has now is kept where it fits; a site's begins with everybody's.
if [ -z "$site" ]; then
  grep -v '^#' requirements.lock > "$resolved"
else
  mkdir -p "$(dirname "$lock")"
  if [ -f "$lock" ]; then grep -v '^torch==' "$lock"; else grep -v '^torch==' requirements.lock; fi > "$resolved"
fi

"$python" -m pip install --quiet uv
compile() { # OPTIONS...: the resolution, kept in $resolved
  "$(dirname "$python")/uv" pip compile --quiet "$@" --constraints "$work/constraints" --no-annotate --no-header \
    pyproject.toml --output-file "$resolved"
}
plain() { # without the libraries of some torch builds, and without systems that are not supported
  grep -vE "^(#|(nvidia|cuda|triton)-?|.*== '(win32|nt|emscripten)')" "$resolved" \
    | sed -E "s/ ; sys_platform != 'emscripten'( and sys_platform != 'win32')?$//; s/ ; os_name != 'nt'.*$//"
}
compile "${options[@]}"
plain > "$work/all"
{
  if [ -n "$site" ]; then
    echo "# The exact versions that launchers/$name/build_environment.sh installs, for Python $wanted. Written by"
    echo "# \`scripts/lock.sh --site $site\`. The libraries that a torch build brings with it are not listed."
    cat "$work/all"
  else
    # What the lessons need comes first: `make lab` installs no more. The versions are those of the whole.
    cp "$resolved" "$work/constraints"
    compile --universal --python-version 3.11 --extra mpi
    plain | sed -E 's/[= ].*//' > "$work/lessons"
    sed -n '/^#/{/^# Beyond/!p;}' requirements.lock
    awk -F '[= ]' 'NR == FNR {lessons[$1]; next} $1 in lessons' "$work/lessons" "$work/all"
    echo "# Beyond the lessons: evaluation, corpora, a hub, decks, the tests."
    awk -F '[= ]' 'NR == FNR {lessons[$1]; next} !($1 in lessons)' "$work/lessons" "$work/all"
  fi
} > "$lock.new"
mv "$lock.new" "$lock"
