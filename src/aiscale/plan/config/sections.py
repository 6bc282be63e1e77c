"""The sections of a `Run` that say what to train: model, optimizer and loop."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aiscale.errors import ConfigError, require, require_not_negative, require_positive
from aiscale.plan.config.choices import ACTIVATIONS

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp64"]


class Heads:
    """Sizes derived from n_head, n_kv_head, d_model and d_ff, for our models and Hugging Face's."""

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_head

    @property
    def kv_heads(self) -> int:
        """Key/value heads: n_kv_head, or n_head if that is 0."""
        return self.n_kv_head or self.n_head

    @property
    def ff_width(self) -> int:
        """Width of the hidden layer of the MLP: d_ff, or 4 d_model if that is 0."""
        return self.d_ff or 4 * self.d_model

    def check_heads(self) -> None:
        """Raise ConfigError if heads do not divide d_model, or key/value heads the heads."""
        require(
            self.d_model % self.n_head == 0,
            f"model.d_model {self.d_model} is not divisible by model.n_head {self.n_head}: "
            "every head needs the same width",
        )
        divides = self.n_head % self.kv_heads == 0
        require(
            divides,
            f"model.n_head {self.n_head} is not divisible by model.n_kv_head {self.kv_heads}",
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Heads):
    """The shape of a decoder-only transformer. A 0 stands for GPT-2's value."""

    n_layer: int = 4  #: L, transformer blocks
    n_head: int = 4  #: H, attention heads
    n_kv_head: int = 0  #: key/value heads (grouped-query attention); 0: as many as n_head
    d_model: int = 128  #: D, width of the residual stream
    d_ff: int = 0  #: width of the hidden layer of the MLP; 0: 4 x d_model
    vocab_size: int = 256  #: V, rows of the embedding; at least the tokenizer's
    max_seq_len: int = 128  #: longest sequence the position embedding knows, in tokens
    #: deepnorm: layer norm of the scaled sum
    norm: Literal["layernorm", "rmsnorm", "deepnorm"] = "layernorm"
    position: Literal["learned", "sinusoidal", "rotary", "alibi", "t5", "shaw", "huang"] = "learned"
    activation: Literal["gelu_tanh", "gelu", "relu", "silu", "reglu", "geglu", "swiglu"] = (
        "gelu_tanh"
    )
    #: attention and MLP read the same input, as in GPT-J and GPT-NeoX
    parallel_residual: bool = False
    tied: bool = True  #: the output head is the token embedding, as in GPT-2
    bias: bool = True  #: biases in linear layers and norms
    #: query, key and value are one matrix; the trainers' own model has three
    fused_qkv: bool = True
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0  #: base of the rotary frequencies
    #: t5, shaw, huang: all greater distances between two tokens count as this one
    relative_distance: int = 128
    #: t5: rows of its table; half of them single distances, the others wider and wider
    relative_buckets: int = 32
    #: recompute each block in the backward pass instead of keeping it
    activation_checkpointing: bool = False
    experts: int = 0  #: in place of each MLP, as Megatron-Core has them, without biases; 0: none
    top_k: int = 2  #: experts that compute a token

    def __post_init__(self) -> None:
        positive = (
            "n_layer n_head d_model vocab_size max_seq_len norm_eps rope_theta relative_distance"
        )
        require_positive("model", self, positive)
        require_not_negative("model", self, "n_kv_head d_ff experts")
        self.check_heads()
        pairs = {"rotary": self.d_head, "sinusoidal": self.d_model}.get(self.position, 0)
        require(
            pairs % 2 == 0,
            f"model.position {self.position} needs pairs of channels, not {pairs}: change d_model",
        )
        require(
            self.position != "t5" or 2 <= self.relative_buckets < 2 * self.relative_distance,
            f"model.relative_buckets is {self.relative_buckets}: set it to at least 2 and below "
            "twice the distance",
        )
        require(
            self.norm != "deepnorm" or not self.parallel_residual,
            "model.norm deepnorm: attention and MLP must add in turn: set "
            "parallel_residual=false, or norm=layernorm",
        )

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate, so that its first matrix is twice as wide."""
        return ACTIVATIONS[self.activation].gated


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "adam", "sgd", "adafactor", "lars", "lamb", "muon", "adamw8bit"] = (
        "adamw"
    )
    lr: float = 1e-3  #: peak learning rate
    min_lr: float = 0.0  #: learning rate at the last step
    warmup_steps: int = 0  #: steps of linear warm-up from 0 to lr
    schedule: Literal["constant", "cosine", "linear", "inverse_sqrt"] = "cosine"
    #: steps after which lr has reached min_lr and stays there; 0: the whole run
    decay_steps: int = 0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8  #: of adam, adamw, lamb and muon's AdamW
    weight_decay: float = 0.1  #: on matrices and embeddings; never on biases and norms
    momentum: float = 0.9  #: of sgd, lars and muon
    #: of lars: the length of a step as a share of the weights' own norm, before lr
    trust: float = 1e-3
    clip_norm: float = 1.0  #: largest global gradient norm; 0: no clipping

    def __post_init__(self) -> None:
        require_positive("optimizer", self, "lr eps trust")
        require_not_negative(
            "optimizer", self, "min_lr warmup_steps decay_steps weight_decay clip_norm momentum"
        )
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optimizer.{name} is {value}: it must lie in [0, 1)")
        require(
            self.min_lr <= self.lr,
            f"optimizer.min_lr {self.min_lr} is above optimizer.lr {self.lr}: lower it",
        )


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    steps: int = 300  #: optimizer steps
    seq_len: int = 128  #: T, tokens in one sequence
    global_batch: int = 16  #: sequences in one optimizer step, over all ranks
    #: sequences in one forward pass of one rank; 0: all of the rank's share at once
    micro_batch: int = 0
    precision: Precision = "fp32"
    checkpoint_every: int = 0  #: steps between checkpoints; 0: only at the end
    checkpoint_minutes: float = 0.0  #: longest time between checkpoints; 0: no limit
    keep_checkpoints: int = 2  #: the number of newest checkpoints to keep on disk
    #: save a checkpoint after the last step; a run that is stopped early always does
    save_last: bool = True
    compile: bool = False  #: torch.compile the model: slow to start, fast on GPUs

    def __post_init__(self) -> None:
        require_positive("loop", self, "steps seq_len global_batch keep_checkpoints")
        counts = "micro_batch checkpoint_every checkpoint_minutes"
        require_not_negative("loop", self, counts)

    def micro_batches(self, dp: int) -> tuple[int, int]:
        """(number of micro-batches, sequences in each) for one of `dp` data-parallel ranks."""
        share, whole = self.global_batch // dp, dp * (self.micro_batch or 1)
        size = self.micro_batch or share
        require(
            self.global_batch % whole == 0,
            f"a batch of {self.global_batch} sequences is no multiple of dp {dp} x micro-batch "
            f"{self.micro_batch or 1} = {whole}: take {-(-self.global_batch // whole) * whole}",
        )
        return share // size, size


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
    """The shape of a Hugging Face language model.

    Causal; bert, an encoder that guesses masked tokens; or t5, whose decoder continues what its
    encoder reads. With a folder, fields that are 0 come from its config.json.
    """

    model_type: str = ""  #: gpt2, gptj, llama, ...: as in transformers; empty: the folder's
    #: a local folder with config.json, and with weights to start from if it has any
    folder: str = ""
    n_layer: int = 0  #: L, transformer blocks
    n_head: int = 0  #: H, attention heads
    n_kv_head: int = 0  #: key/value heads; 0: as many as n_head
    d_model: int = 0  #: D, width of the residual stream
    d_ff: int = 0  #: width of the hidden layer of the MLP; 0: 4 x d_model
    vocab_size: int = 0  #: V, rows of the embedding; at least the tokenizer's
    max_seq_len: int = 0  #: longest sequence, in tokens
    #: recompute each block in the backward pass instead of keeping it
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        require_not_negative("model", self, " ".join(_ALIASES))
        if self.folder and not (self.model_type and all(getattr(self, name) for name in _NEEDED)):
            self._read_folder()
        require(
            bool(self.model_type),
            "model.model_type is empty: name an architecture (gpt2), or set model.folder",
        )
        require_positive("model", self, " ".join(_NEEDED))
        self.check_heads()

    @property
    def shape(self) -> ModelConfig:
        """The closest GPT of ours: the same matrices and FLOPs; norms and biases may differ."""
        like = "llama" if self.model_type in LLAMA_LIKE else self.model_type
        names = (*_NEEDED, "n_kv_head", "activation_checkpointing")
        sizes = {name: getattr(self, name) for name in names}
        return ModelConfig(
            **sizes,
            d_ff=self.ff_width,
            tied=self.model_type == "gpt2",
            **_ARCHITECTURES.get(like, {}),
        )

    @classmethod
    def like(cls, gpt: ModelConfig, model_type: str, **more) -> HFModelConfig:
        """That architecture in a GPT's shape."""
        names = (*_NEEDED, "n_kv_head", "d_ff", "activation_checkpointing")
        return cls(model_type=model_type, **{name: getattr(gpt, name) for name in names} | more)

    @property
    def objective(self) -> Literal["next", "masked", "second half"]:
        """What is predicted: every next token, hidden tokens, or the second half from the first."""
        return {"bert": "masked", "t5": "second half"}.get(self.model_type, "next")

    def _read_folder(self) -> None:
        """Fill unset fields from the folder's config.json."""
        path = Path(self.folder) / "config.json"
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model.folder is {self.folder}, no Hugging Face folder on this disk ({error})"
            ) from None
        shape = {"model_type": raw.get("model_type") or ""}
        for name, aliases in _ALIASES.items():
            shape[name] = next((raw[alias] for alias in aliases if raw.get(alias)), 0)
        for name, value in shape.items():
            own = getattr(self, name)
            require(
                own in (0, "", value) or not value,
                f"model.{name} is {own}, but {path} says {value}: leave it out",
            )
            object.__setattr__(self, name, own or value)  # the dataclass is frozen


LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
_ARCHITECTURES = {
    "llama": {"norm": "rmsnorm", "position": "rotary", "activation": "swiglu", "bias": False},
    "gptj": {"position": "rotary", "parallel_residual": True},
    "gpt_neox": {"position": "rotary", "parallel_residual": True},
}
