"""`python -m aiscale.book ...` is `aiscale notebooks ...`."""

import sys

from aiscale.cli import main

raise SystemExit(main(["notebooks", *sys.argv[1:]]))
