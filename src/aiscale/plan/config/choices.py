"""The named choices of a model, its optimizer, its precision: what each is.

A new choice is a row here, its formula in lesson/model/gpt.py or lesson/optim.py, and a line in
tests/test_choices.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Activation:
    label: str  #: for figures
    function: str  #: of model.ACTIVATIONS; of the gate, if there is one
    #: tensors of the hidden width that the backward pass needs, the next layer's input among them
    kept: int
    #: two products of the input, of which the activated one multiplies the other
    gated: bool = False


ACTIVATIONS = {
    "gelu_tanh": Activation("GELU", "gelu_tanh", 2),
    "gelu": Activation("GELU", "gelu", 2),  # Hendrycks and Gimpel 2016
    # Glorot et al. 2011; its output tells where it was positive.
    "relu": Activation("ReLU", "relu", 1),
    "silu": Activation("Swish", "silu", 2),  # Ramachandran et al. 2017, with beta 1
    # Shazeer 2020; kept are gate, value, activated gate and their product.
    "reglu": Activation("ReGLU", "relu", 4, gated=True),
    "geglu": Activation("GEGLU", "gelu", 4, gated=True),
    "swiglu": Activation("SwiGLU", "silu", 4, gated=True),
}


@dataclass(frozen=True)
class OptimizerChoice:
    #: numbers kept for each weight; of muon for those that it does not orthogonalize
    moments: float
    has_counter: bool = False  #: a step counter of 4 bytes for each tensor


OPTIMIZERS = {
    "sgd": OptimizerChoice(1),
    "adam": OptimizerChoice(2, True),
    "adamw": OptimizerChoice(2, True),
    "adafactor": OptimizerChoice(1, True),  # of a matrix only a row's and a column's
    "lars": OptimizerChoice(1),
    "lamb": OptimizerChoice(2, True),
    "muon": OptimizerChoice(2, True),
    "adamw8bit": OptimizerChoice(0.5),  # two of one byte, where a weight has four
    "sgd_plain": OptimizerChoice(0),  # without momentum; for formulas only
}


def is_orthogonalized(name: str, n_dims: int) -> bool:
    """Whether Muon orthogonalizes this update; embeddings, head and vectors take AdamW's."""
    others = ("embed", "head", "wte", "wpe", "shared")
    return n_dims == 2 and not any(word in name for word in others)
