#!/usr/bin/env bash
# Writes requirements.lock anew from pyproject.toml, keeping every version that still fits: `make lock`.
#
# uv resolves for all supported Pythons and systems at once, which pip cannot. What only some torch builds bring with
# them (the CUDA libraries and triton) is left out, so that one lock serves CPU, CUDA and ROCm builds.
set -euo pipefail
cd "$(dirname "$0")/.."

.venv/bin/python -m pip install --quiet uv
resolved=$(mktemp)
trap 'rm -f "$resolved"' EXIT
cp requirements.lock "$resolved"
.venv/bin/uv pip compile --quiet --universal --python-version 3.11 --all-extras --no-annotate --no-header \
  pyproject.toml --output-file "$resolved"
{
  sed -n '/^#/p' requirements.lock
  grep -vE "^(nvidia|cuda|triton)-?|== '(win32|nt|emscripten)'" "$resolved" \
    | sed -E "s/ ; sys_platform != 'emscripten'( and sys_platform != 'win32')?$//; s/ ; os_name != 'nt'.*$//"
} > requirements.lock.new
mv requirements.lock.new requirements.lock
