"""aiscale: a workshop kit that teaches, and then does, the training of language models at scale."""

import importlib
import os
from types import ModuleType

# OpenMP's threads spin while they wait. On a laptop or a login node that others use too, a spinning
# thread holds the core that its sibling needs: training steps have been seen to take ten times as
# long. Sleeping threads cost microseconds. OpenMP reads this when torch is first imported; `make`
# sets it as well, for notebooks that import torch before us, and whoever sets the variable decides.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

#: What notebooks import from here, and the wing in which it lives.
_FACES = {
    "cluster": "lesson",
    "cost": "plan",
    "machines": "plan",
    "meter": "measure",
    "plots": "measure",
    "published": "plan",
}


def __getattr__(name: str) -> ModuleType:
    if name in _FACES:
        return importlib.import_module(f"aiscale.{_FACES[name]}.{name}")
    raise AttributeError(f"module 'aiscale' has no attribute {name!r}")
