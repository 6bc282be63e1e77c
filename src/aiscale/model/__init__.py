"""The model: our GPT and its parts, Hugging Face's behind the same face, text generated, weights in and out.

    GPT(run.model)                       # gpt.py; the module knows nothing of processes
    build_model(run)                     # build.py: the module that a `Run` trains, ours or transformers'
    hf.read(folder), hf.write(model, folder)

kernels.py holds the few operations that we do faster than torch's plain way, generation.py text token by token.
"""

from aiscale.model.build import HFModel, build_model, count_parameters, parameter_shapes
from aiscale.model.gpt import ACTIVATIONS, GPT, rotary_angles
from aiscale.model.kernels import cross_entropy, cross_entropy_plain

__all__ = [
    "ACTIVATIONS",
    "GPT",
    "HFModel",
    "build_model",
    "count_parameters",
    "cross_entropy",
    "cross_entropy_plain",
    "parameter_shapes",
    "rotary_angles",
]
