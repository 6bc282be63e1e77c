#!/usr/bin/env bash
# Resolves a lock anew from pyproject.toml by uv, keeping every version that still fits: `make lock`.
#
#   scripts/lock.sh                   requirements.lock: every Python and system, what the lessons need first
#   scripts/lock.sh --site frontier   launchers/frontier/requirements.lock, by the table [build] of the site's profile;
#                                     or of a profile of your own: --site mine.toml
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin work=$(mktemp -d) lock=requirements.lock site=${2-}
trap 'rm -rf "$work"' EXIT
$bin/python -m pip install -q uv

# One lock serves CPU, CUDA and ROCm: the libraries that a build of torch brings with it are left out.
compile() { # OPTIONS...
  $bin/uv pip compile -q "$@" --constraints "$work/pins" --no-annotate --no-header pyproject.toml -o "$work/lock"
  grep -vE "^(#|(nvidia|cuda|triton)-?|.*== '(win32|nt|emscripten)')" "$work/lock" \
    | sed -E "s/ ; sys_platform != 'emscripten'( and sys_platform != 'win32')?$//; s/ ; os_name != 'nt'.*$//"
}

if [ -n "$site" ]; then
  fields='from aiscale.site.profiles import find; s = find("'$site'"); print(s.name, s.build.python, s.build.torch)'
  read -r name python torch <<< "$($bin/python -c "$fields")"
  lock=launchers/$name/requirements.lock
  if [ -f "$lock" ]; then grep -v '^torch==' "$lock"; else grep -v '^torch==' requirements.lock; fi > "$work/lock"
  echo "torch==$torch" > "$work/pins"
  echo "# The exact versions that launchers/$name/build_environment.sh installs, for Python $python. Written by
# \`scripts/lock.sh --site $name\`. The libraries that a torch build brings with it are not listed." > "$work/new"
  compile --python-version "$python" --python-platform x86_64-manylinux_2_28 --extra data --extra eval >> "$work/new"
else
  grep -v '^#' $lock > "$work/lock"
  touch "$work/pins"
  extras=$(sed -n '/^\[project.optional-dependencies\]/,/^\[/s/^\([a-z]*\) = \[.*/--extra \1/p' pyproject.toml | grep -v science)
  # shellcheck disable=SC2086 # words
  compile --universal --python-version 3.11 $extras > "$work/all"
  mv "$work/lock" "$work/pins"
  compile --universal --python-version 3.11 --extra mpi > "$work/lessons"
  {
    sed -n '/^#/{/^# Beyond/!p;}' $lock
    awk -F '[= ]' 'NR == FNR {lessons[$1]; next} $1 in lessons' "$work/lessons" "$work/all"
    echo "# Beyond the lessons: evaluation, corpora, a hub, decks, the tests."
    awk -F '[= ]' 'NR == FNR {lessons[$1]; next} !($1 in lessons)' "$work/lessons" "$work/all"
  } > "$work/new"
fi
mv "$work/new" "$lock"
