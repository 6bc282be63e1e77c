"""The model: our GPT, Hugging Face's models with the same interface, Hugging Face folders.

build.py makes the module that a `Run` trains, ours (gpt.py) or transformers'; positions.py has what
tells a model where tokens stand, kernels.py a few operations that are faster than plain torch.
"""

from aiscale.lesson.model.gpt import ACTIVATIONS, GPT
from aiscale.lesson.model.kernels import cross_entropy, cross_entropy_plain
from aiscale.lesson.model.positions import place
