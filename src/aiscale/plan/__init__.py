"""How many nodes, which layout, how long, does it fit: by formulas; see `command` for calls."""
