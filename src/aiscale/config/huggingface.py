"""A `Run.model` from Hugging Face's transformers.

    HFModelConfig(model_type="gpt2", n_layer=48, n_head=25, d_model=1600, vocab_size=50257, max_seq_len=1024)
    HFModelConfig(folder="gpt2/")         # a local folder: its config.json, and its weights if it has any

The fields have the same names as `ModelConfig`'s for every architecture. Only config.json is read here; transformers is
imported when `model.build_model` builds the model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from aiscale.config.errors import ConfigError, require, require_positive
from aiscale.config.sections import Heads, ModelConfig

#: our name -> its names in config.json, by architecture
_ALIASES = {
    "n_layer": ("num_hidden_layers", "n_layer", "num_layers"),
    "n_head": ("num_attention_heads", "n_head"),
    "n_kv_head": ("num_key_value_heads",),
    "d_model": ("hidden_size", "n_embd", "d_model"),
    "d_ff": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocab_size": ("vocab_size",),
    "max_seq_len": ("max_position_embeddings", "n_positions", "n_ctx"),
}
_NEEDED = ("n_layer", "n_head", "d_model", "vocab_size", "max_seq_len")


@dataclass(frozen=True, kw_only=True)
class HFModelConfig(Heads):
    """The shape of a Hugging Face causal language model. With a folder, fields that are 0 come from its config.json."""

    model_type: str = ""  #: gpt2, gptj, llama, ...: as in transformers; empty: the folder's
    folder: str = ""  #: a local folder with config.json, and with weights to start from if it has any
    n_layer: int = 0  #: L, transformer blocks
    n_head: int = 0  #: H, attention heads
    n_kv_head: int = 0  #: key/value heads; 0: as many as n_head
    d_model: int = 0  #: D, width of the residual stream
    d_ff: int = 0  #: width of the hidden layer of the MLP; 0: 4 x d_model
    vocab_size: int = 0  #: V, rows of the embedding; at least the tokenizer's
    max_seq_len: int = 0  #: longest sequence, in tokens
    settings: str = ""  #: further options of the architecture, such as rotary_dim=16,tie_word_embeddings=true
    activation_checkpointing: bool = False  #: recompute each block in the backward pass instead of keeping it

    def __post_init__(self) -> None:
        for name in _ALIASES:
            require(getattr(self, name) >= 0, f"model.{name} is {getattr(self, name)}: it must not be negative")
        if self.folder and not (self.model_type and all(getattr(self, name) for name in _NEEDED)):
            self._read_folder()
        require(bool(self.model_type), "model.model_type is empty: name an architecture (gpt2), or set model.folder")
        require_positive("model", self, " ".join(_NEEDED))
        self.check_heads()
        _ = self.options  # check now rather than when the model is built

    @property
    def options(self) -> dict[str, object]:
        """`settings` as a dictionary; values are parsed as JSON, else kept as text."""
        found = {}
        for pair in filter(None, (part.strip() for part in self.settings.split(","))):
            key, equals, text = pair.partition("=")
            require(bool(equals), f"model.settings has {pair!r} without '=': write it as key=value,key=value")
            try:
                found[key.strip()] = json.loads(text)
            except ValueError:
                found[key.strip()] = text.strip()
        return found

    @property
    def shape(self) -> ModelConfig:
        """The closest GPT of ours: the same matrices, so the same FLOPs; norms and biases may differ."""
        like = "llama" if self.model_type in LLAMA_LIKE else self.model_type
        sizes = {name: getattr(self, name) for name in (*_NEEDED, "n_kv_head", "activation_checkpointing")}
        tied = self.options.get("tie_word_embeddings", self.model_type == "gpt2")
        return ModelConfig(**sizes, d_ff=self.ff_width, tied=bool(tied), **_ARCHITECTURES.get(like, {}))

    def _read_folder(self) -> None:
        """Fill unset fields from the folder's config.json."""
        path = Path(self.folder) / "config.json"
        try:
            raw = json.loads(path.read_text())
        except OSError:
            problem = "has no readable config.json" if path.parent.is_dir() else "is not a folder"
            raise ConfigError(f"model.folder {self.folder} {problem}: name a local Hugging Face folder") from None
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON ({error}): copy the folder again") from None
        found = {"model_type": raw.get("model_type") or ""}
        for name, aliases in _ALIASES.items():
            found[name] = next((raw[alias] for alias in aliases if raw.get(alias)), 0)
        for name, value in found.items():
            given = getattr(self, name)
            require(
                not given or given == (value or given),
                f"model.{name} is {given}, but {path} says {value}: leave it out, or another folder",
            )
            object.__setattr__(self, name, given or value)  # the dataclass is frozen
        missing = [name for name in _NEEDED if not getattr(self, name)]
        require(not missing, f"{path} does not give model.{', model.'.join(missing)}: set it")


LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
_ARCHITECTURES = {
    "llama": {"norm": "rmsnorm", "position": "rotary", "activation": "swiglu", "bias": False},
    "gptj": {"position": "rotary", "parallel_residual": True},
    "gpt_neox": {"position": "rotary", "parallel_residual": True},
}
