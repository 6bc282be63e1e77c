"""How many nodes, which layout, how long, does it fit: answered from formulas; see `command` for the calls."""
