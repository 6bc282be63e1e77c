"""Measurements by others (papers/) and our earlier ones (measured/), with sources; their reader."""

from aiscale.plan.published.reader import (
    claims,
    facts,
    measured,
    names,
    radius_beside_ours,
    table,
    verified,
)
