"""Everything that a run needs to go on, in one file of NumPy's: arrays and a text, no pickled objects.

python -m from_scratch.checkpoint run.npz trained.npz     # the weights alone, in 16 bits: a sixth of the bytes
"""

import json
import os
import sys

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
    if adam and not any(name.startswith("m/") for name in arrays):
        raise SystemExit("this file has weights without Adam's moments, so no run can go on from it: use it to infer")
    for name, w in model.parameters().items():
        w.array = tensor.device.to_device(arrays[f"w/{name}"].astype(np.float32))
        if adam:
            adam.m[name] = tensor.device.to_device(arrays[f"m/{name}"])
            adam.v[name] = tensor.device.to_device(arrays[f"v/{name}"])


def keep_weights(path, trained):
    """A file that can infer but not train on: no moments, and 16 bits a weight."""
    about, arrays = read(path)
    weights = {name: x.astype(np.float16) for name, x in arrays.items() if name.startswith("w/")}
    np.savez_compressed(trained, about=json.dumps(about), **weights)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    keep_weights(*sys.argv[1:])
