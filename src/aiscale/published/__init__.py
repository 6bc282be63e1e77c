"""Measurements by others (papers/) and our earlier ones (measured/): tables with sources, and their reader."""

from aiscale.published.reader import facts, measured, names, radius_beside_ours, table, verified
