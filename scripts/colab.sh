#!/usr/bin/env bash
# What lessons 00 and 03 need on Colab, installed into its own Python, whose other packages stay as they are.
# The first cell of a lesson there (the site's pages of 00 and 03 have it with the repository's address):
#
#   !git clone -q --depth 1 ADDRESS /content/aiscale && bash /content/aiscale/scripts/colab.sh
#   %cd /content/aiscale/notebooks
set -euo pipefail
cd -P "$(dirname "$0")/.."
pip() { python3 -m pip --disable-pip-version-check --no-input install -q "$@"; }
lock() { sed -nE "s/^($1==[^ ;]+).*/\1/p" requirements.lock; }

python3 -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
  || { echo "Colab's Python is $(python3 -V), and the lessons need 3.11 to 3.13" >&2; exit 1; }
python3 -c 'import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)' 2> /dev/null \
  || pip "$(lock torch)" --index-url "${PYTORCH_INDEX:-https://download.pytorch.org/whl}/cpu"
pip --upgrade-strategy only-if-needed "$(lock ipyparallel)" "$(lock stack-data)"
pip --no-deps --no-build-isolation .  # not editable: a running kernel would not see it
echo 'aiscale is installed: go on with the lesson'
