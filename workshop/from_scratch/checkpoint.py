"""Everything that a run needs to go on, in one file of NumPy's."""

import json
import os

import numpy as np

from . import tensor


def save(path, model, adam, words, shape):
    """Written beside the old one and then moved over it: whoever is cut off keeps one of the two."""
    arrays = {f"w/{name}": w.array for name, w in model.parameters().items()}
    arrays |= {f"m/{name}": m for name, m in adam.m.items()} | {f"v/{name}": v for name, v in adam.v.items()}
    about = json.dumps({"steps": adam.steps, "words": words, "shape": shape})
    partial = f"{path}.partial"
    with open(partial, "wb") as file:
        np.savez(file, about=about, **{name: tensor.device.to_host(x) for name, x in arrays.items()})
    os.replace(partial, path)


def read(path):
    """(about, arrays): steps taken, words of the vocabulary, shape of the model; w/NAME, m/NAME, v/NAME."""
    with np.load(path) as file:
        arrays = dict(file)
    return json.loads(str(arrays.pop("about"))), arrays


def restore(arrays, model, adam=None):
    for name, w in model.parameters().items():
        w.array = tensor.device.to_device(arrays[f"w/{name}"])
        if adam:
            adam.m[name] = tensor.device.to_device(arrays[f"m/{name}"])
            adam.v[name] = tensor.device.to_device(arrays[f"v/{name}"])
