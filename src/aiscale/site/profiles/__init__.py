"""Site profiles: what launchers, rehearsals and notebooks' ranks must know of a computing centre.

A profile is a data file, NAME.toml in this folder, with a date and a source for every rule.
"""

from aiscale.site.profiles.profile import (
    ENDED,
    GpuKind,
    Shell,
    Site,
    SiteError,
    find,
    here,
    load,
    names,
    site,
)
