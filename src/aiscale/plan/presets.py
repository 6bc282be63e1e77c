"""Models by name, from presets.toml, as the formulas read them."""

from __future__ import annotations

import functools
import re
import tomllib
from pathlib import Path

from aiscale.errors import ConfigError, hint
from aiscale.plan.config import HFModelConfig, ModelConfig

TABLE = Path(__file__).parents[1] / "presets.toml"


@functools.cache
def presets() -> dict[str, dict]:
    """The table: {name: its entries}."""
    return tomllib.loads(TABLE.read_text())


def model_of(name: str, recompute: bool = False) -> ModelConfig | HFModelConfig:
    """The model of a preset, a size such as 4x128, or a folder with transformers' config.json.

    Raises ConfigError.
    """
    more = {"activation_checkpointing": recompute}
    size = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", name)
    if size:  # as aiscale.train.presets has it
        layers, width = int(size[1]), int(size[2])
        sizes = {"n_layer": layers, "d_model": width, "n_head": max(1, width // 32)}
        return ModelConfig(**sizes, max_seq_len=128, position="learned", tied=False, **more)
    if name not in presets():
        if (Path(name) / "config.json").is_file():
            return HFModelConfig(folder=name, **more)
        raise ConfigError(f"unknown model {name!r}: {hint(name.lower(), presets())}")
    preset = presets()[name]
    sizes = {
        "n_layer": preset["layers"],
        "n_head": preset["heads"],
        "d_model": preset["width"],
        "vocab_size": preset["vocabulary"],
        "max_seq_len": preset["context"],
    }
    if "transformers" in preset:
        return HFModelConfig(model_type=preset["transformers"]["model_type"], **sizes, **more)
    position = "rotary" if preset.get("rotary") else "learned"
    return ModelConfig(**sizes, tied=preset.get("tied", False), position=position, **more)
