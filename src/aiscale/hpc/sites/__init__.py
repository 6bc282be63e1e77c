"""Site profiles: what a launcher, a rehearsal and a notebook's ranks must know of a computing centre.

    site("frontier").node.gpus                    # 8
    site("perlmutter").scheduler.qos["debug"]     # Qos(name='debug', max_nodes=8, max_hours=0.5, ...)
    here()                                        # the profile of this machine, or None
    load("mine.toml")                             # a profile of your own; `aiscale launchers --site mine.toml`

A profile is a data file, NAME.toml in this folder, with a date and a source for every rule.
"""

from aiscale.hpc.sites.profile import ENDED, GpuKind, Site, SiteError, find, here, load, names, site
