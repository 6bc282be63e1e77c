"""Sites: what a batch file, a rehearsal and a notebook's engines must know of a computing centre.

    site("frontier").node.gpus                    # 8
    site("perlmutter").scheduler.qos["debug"]     # Qos(name='debug', max_nodes=8, max_hours=0.5, ...)
    here()                                        # the profile of the machine that this runs on, or None
    load("mine.toml")                             # a profile of your own; `aiscale launchers --site mine.toml`

A profile is a file of data, NAME.toml beside this one, dated, with the source of every rule in it.
"""

from aiscale.hpc.sites.profile import GpuKind, Site, SiteError, find, here, load, names, site

__all__ = ["GpuKind", "Site", "SiteError", "find", "here", "load", "names", "site"]
