"""A model of transformers in a trainer: --model FOLDER, or a preset that says `transformers`."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from aiscale.train.presets import presets
from aiscale.train.refusal import refuse

try:
    from accelerate import init_empty_weights
except ModuleNotFoundError:
    refuse("a model of transformers needs accelerate, which `make setup` installs")


class Transformer(nn.Module):
    """A causal language model of transformers, as our strategies want it: logits, and `blocks`."""

    def __init__(self, name):
        super().__init__()
        if name in presets():
            config = AutoConfig.for_model(**presets()[name]["transformers"])
        else:
            config = AutoConfig.from_pretrained(name)
        for key in vars(config):  # each rank would draw masks of its own
            if "dropout" in key or key.endswith("_pdrop"):
                setattr(config, key, 0.0)
        config.use_cache = False
        with init_empty_weights(include_buffers=False):
            self.inner = AutoModelForCausalLM.from_config(config)
        lists = [module for module in self.inner.modules() if isinstance(module, nn.ModuleList)]
        self.__dict__["blocks"] = max(lists, key=len)  # not registered a second time

    def tie_weights(self):
        self.inner.tie_weights()

    def forward(self, x):  # (B, T) -> (B, T, V)
        return self.inner(input_ids=x).logits


def stored_weights(folder):
    """A function that gives a whole tensor of the folder by name; None without *.safetensors."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        return None
    from safetensors import safe_open

    opened = [safe_open(file, "pt") for file in files]
    by_name = {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def stored(name):
        name = name.removeprefix("inner.")
        # GPT-2's own files were written without the outer module's name.
        for candidate in (name, name.split(".", 1)[-1]):
            if candidate in by_name:
                return by_name[candidate].get_tensor(candidate)
        refuse(f"{folder} has no tensor {name} in its *.safetensors")

    return stored
