"""Accelerators and systems, one file each with its sources; see `catalogue` for the calls."""

from aiscale.plan.machines.catalogue import (
    ACCELERATORS,
    MACHINES,
    Accelerator,
    Machine,
    Network,
    Node,
    find,
    find_device,
    find_machine,
)
