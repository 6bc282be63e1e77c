"""Models by name, from presets.toml. Without torch: the planner and `aiscale submit` read it too.

    shape_of("gpt2-xl").flops_per_token(1024)
    shape_of("4x128")               # a size that the table lacks: 4 layers, 128 wide

Letters: L layers, D width, V vocabulary, T tokens of a sequence.
"""

from __future__ import annotations

import functools
import json
import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from aiscale.train.refusal import refuse

TABLE = Path(__file__).parents[1] / "presets.toml"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a GPT, by the names of presets.toml."""

    layers: int
    heads: int
    width: int
    vocabulary: int
    context: int  #: tokens of the longest sequence
    tied: bool = False
    rotary: bool = False

    def flops_per_token(self, length: int, mlps: int = 1) -> float:
        """Forward and backward: 72 L D^2 + 12 L D T + 6 D V (Chowdhery et al. 2022, appendix B).

        Matrix products only, an add and a multiply are two, nothing that is computed twice. In a
        mixture a token goes through several `mlps`; the router is left out.
        """
        matrices = (24 + 48 * mlps) * self.layers * self.width**2
        attention = 12 * self.layers * self.width * length
        return matrices + attention + 6 * self.width * self.vocabulary


@functools.cache
def presets() -> dict[str, dict]:
    """The table: {name: its entries}."""
    return tomllib.loads(TABLE.read_text())


def entries_of(model: str) -> dict | None:
    """Of a name in the table, or of a size such as 4x128: heads of 32, bytes as tokens. Or None."""
    size = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", model)
    if not size:
        return presets().get(model)
    layers, width = int(size[1]), int(size[2])
    heads = max(1, width // 32)
    if width % heads:
        rule = f"{width} is no multiple of its {heads} heads, of which there is one for each 32"
        refuse(f"--model {model}: {rule}: take {layers}x{32 * heads}")
    return {"layers": layers, "heads": heads, "width": width, "vocabulary": 256, "context": 128}


def is_ours(model: str) -> bool:
    """Whether our GPT is trained, and no model of transformers."""
    entries = entries_of(model)
    return entries is not None and "transformers" not in entries


def shape_of(model: str) -> Shape:
    """Of a name in the table, a size, or a folder with a config.json of transformers."""
    entries = entries_of(model)
    if entries is not None:
        known = {field.name for field in fields(Shape)}
        return Shape(**{key: value for key, value in entries.items() if key in known})
    file = Path(model) / "config.json"
    if not file.is_file():
        names = ", ".join(presets())
        rest = f"no size such as 4x128, and none of: {names}"
        refuse(f"--model {model} is no folder with a config.json, {rest}")
    config = json.loads(file.read_text())

    def first_of(*names: str) -> int:
        """Each family of transformers has names of its own."""
        for name in names:
            if name in config:
                return config[name]
        refuse(f"{file} has none of {', '.join(names)}: of this model no shape is known")

    return Shape(
        layers=first_of("num_hidden_layers", "n_layer", "num_layers"),
        heads=first_of("num_attention_heads", "n_head", "num_heads"),
        width=first_of("hidden_size", "n_embd", "d_model"),
        vocabulary=first_of("vocab_size"),
        context=first_of("max_position_embeddings", "n_positions"),
    )
