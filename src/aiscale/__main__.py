"""`python -m aiscale ...`: the form that launchers use."""

from aiscale.cli import main

raise SystemExit(main())
