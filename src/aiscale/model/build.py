"""Build the module that a run trains: our GPT, or a Hugging Face model with the same interface.

    model = build_model(run.model)
    loss = model(tokens, targets)        # mean cross-entropy, a scalar, for both kinds
    model.blocks                         # the layers, which strategies shard and recompute one by one

Weights come from torch's global random generator (the caller seeds it), or from the configured folder.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aiscale import cost
from aiscale.config import ConfigError, HFModelConfig, ModelConfig
from aiscale.model.gpt import GPT

#: our name -> the attribute that every transformers configuration has
_CANONICAL = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "d_model": "hidden_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
}
#: objective -> the class of transformers that has it
_AUTO = {"next": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM", "second half": "AutoModelForSeq2SeqLM"}
MASKED_SHARE = 0.15  #: of the tokens of a sequence, as in BERT (Devlin et al. 2019), which the last entry of the
#: vocabulary stands for: of bytes 255, which no text has


def build_model(config: ModelConfig | HFModelConfig, *, weights: bool = True) -> GPT | HFModel:
    """The model of `config`, in fp32. weights: load those in the folder of `config`, if it has any."""
    return HFModel(config, weights=weights) if isinstance(config, HFModelConfig) else GPT(config)


def build_outline(config: ModelConfig | HFModelConfig) -> GPT | HFModel:
    """As `build_model`, but ours comes on the meta device: a rank makes room for its part and lets
    `GPT.draw` fill it, so no host holds the whole model. transformers' models draw all at once."""
    if isinstance(config, HFModelConfig):
        return build_model(config)
    with torch.device("meta"):
        return GPT(config)


def count_parameters(config: ModelConfig | HFModelConfig) -> int:
    """The exact number of parameters; a tied head counts once. Without a formula, counted on the meta device."""
    try:
        return cost.parameter_count(config)
    except ConfigError:
        with torch.device("meta"):
            return build_model(config, weights=False).num_parameters()


def transformers_config(config: HFModelConfig):
    """The configuration of transformers without dropout; raises ConfigError if there is none."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if config.model_type not in CONFIG_MAPPING:
        raise ConfigError(f"model.model_type is {config.model_type!r}: this transformers has no such architecture")
    if config.folder:
        path = Path(config.folder)
        if not (path / "config.json").is_file():
            raise ConfigError(f"model.folder {config.folder} has no config.json: bring it back, or name another folder")
        hf_config = AutoConfig.from_pretrained(path)
    else:
        hf_config = _from_shape(CONFIG_MAPPING[config.model_type], config)
    for ours, theirs in _CANONICAL.items():
        if (has := getattr(hf_config, theirs, None)) not in (None, getattr(config, ours)):
            raise ConfigError(f"model.{ours} is {getattr(config, ours)}, but {config.folder or theirs} has {has}")
    for key in vars(hf_config):  # every strategy must give the same loss, but dropout differs between ranks
        if "dropout" in key or key.endswith("_pdrop"):
            setattr(hf_config, key, 0.0)
    if (getattr(hf_config, "rotary_dim", None) or 0) > config.d_head:
        hf_config.rotary_dim = config.d_head  # GPT-J rotates 64 channels of a head, unless it has fewer
    hf_config.use_cache = False
    return hf_config


def _from_shape(kind: type, config: HFModelConfig):
    usual = kind()  # the architecture's defaults
    sizes = {"n_inner" if hasattr(usual, "n_inner") else "intermediate_size": config.ff_width}
    sizes |= {theirs: getattr(config, ours) for ours, theirs in _CANONICAL.items()}
    if config.model_type == "t5":  # relative positions: any length
        del sizes["max_position_embeddings"], sizes["intermediate_size"]
        sizes |= {"d_ff": config.ff_width, "d_kv": config.d_head, "num_decoder_layers": config.n_layer}
    if config.kv_heads == config.n_head and not hasattr(usual, "num_key_value_heads"):
        del sizes["num_key_value_heads"]
    if unknown := [key for key in sizes if not hasattr(usual, key)]:
        raise ConfigError(f"{type(usual).__name__} has no {unknown[0]}: name another model.model_type")
    # The default begin and end tokens are only valid for the default vocabulary.
    if config.vocab_size != usual.vocab_size:
        sizes |= {"bos_token_id": None, "eos_token_id": None}
    return kind(**sizes)


class HFModel(nn.Module):
    """A language model of transformers that takes (tokens, targets) and returns the loss, as GPT does. Parameter names
    are those of transformers, because the model's submodules are registered here instead of the model itself."""

    def __init__(self, config: HFModelConfig, *, weights: bool = True) -> None:
        super().__init__()
        self.config = config
        inner = _instantiate(config, transformers_config(config), weights)
        self.__dict__["inner"] = inner  # as an attribute it would be a submodule
        for name, child in inner.named_children():
            self.add_module(name, child)
        if config.activation_checkpointing:
            enable = getattr(inner, "activation_checkpointing_enable", None) or inner.gradient_checkpointing_enable
            enable({"use_reentrant": False, "preserve_rng_state": False})  # there is no dropout to repeat
        self.train()

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers in order; of an encoder-decoder first the encoder's."""
        lists = [m for m in self.modules() if isinstance(m, nn.ModuleList) and len(m) == self.config.n_layer]
        if not lists:
            raise ConfigError(f"{type(self.inner).__name__} keeps its layers in no list: this strategy needs one")
        return [block for blocks in lists if type(blocks[0]) is type(lists[0][0]) for block in blocks]

    def train(self, mode: bool = True) -> HFModel:
        """Set training mode, which without dropout only decides whether blocks are recomputed."""
        super().train(mode)
        self.inner.training = mode  # not a registered submodule
        return self

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens (B,T) -> logits (B,T,V); with targets (B,T), the mean cross-entropy in nats of what the objective
        predicts, a scalar. A masked model does not need the targets, only tells by them that it is trained."""
        if targets is None:
            return self.inner(input_ids=tokens).logits
        if self.config.objective == "masked":
            hidden = hidden_tokens(tokens)
            logits = self.inner(input_ids=tokens.masked_fill(hidden, self.config.vocab_size - 1)).logits[hidden]
            targets = tokens[hidden]
        elif self.config.objective == "second half":
            (first, second), targets = tokens.tensor_split(2, dim=1), targets.tensor_split(2, dim=1)[1]
            logits = self.inner(input_ids=first, decoder_input_ids=second, use_cache=False).logits
        else:
            logits = self.inner(input_ids=tokens, use_cache=False).logits
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.flatten(0, -2).to(wide), targets.flatten())

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a folder that `AutoModelForCausalLM.from_pretrained` opens."""
        self.inner.config.use_cache = True
        self.inner.save_pretrained(folder)


def hidden_tokens(tokens: Tensor) -> Tensor:
    """tokens (B,T) -> (B,T), True at MASKED_SHARE of each row: chosen by a hash of the tokens so far, so that ranks
    agree with one process, and as many in each row, so that a mean of means is the mean."""
    place = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    mixed = (tokens.cumsum(dim=1) * 2654435761 + place * 40503) % 2**20
    positions = (mixed * 2**12 + place).topk(max(1, int(MASKED_SHARE * tokens.shape[1])), dim=1).indices
    return torch.zeros_like(tokens, dtype=torch.bool).scatter_(1, positions, True)


def quiet() -> None:
    """Silence transformers' progress bars and warnings, which every rank would print."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def weight_files(config: HFModelConfig) -> list[Path]:
    """The files with weights in the folder of `config`, if it has one."""
    folder = Path(config.folder)
    found = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    return found if config.folder else []


def _instantiate(config: HFModelConfig, hf_config, weights: bool) -> nn.Module:
    """transformers' model, with torch's fused attention if it supports that (GPT-J does not)."""
    import transformers

    quiet()
    kind, folder = getattr(transformers, _AUTO[config.objective]), Path(config.folder)
    start = weights and weight_files(config)
    error = None
    for attention in ("sdpa", "eager"):
        how = {"dtype": torch.float32, "attn_implementation": attention}
        try:
            if start:
                return kind.from_pretrained(folder, config=hf_config, local_files_only=True, **how)
            return kind.from_config(hf_config, **how)
        except (ValueError, RuntimeError, OSError) as problem:
            error = problem
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    raise ConfigError(f"transformers cannot build {config.folder or config.model_type}: {reason}") from error
