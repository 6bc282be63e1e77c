"""What a model computes and holds, for the planner: parameters of a stage, products of a layer, FLOPs of a token.

    shape = shape_of(recipe("forge-m").model, seq=2048)
    shape.layer_parameters, shape.parameters, shape.flops_per_token()

Letters: D hidden, F width of the MLP, V vocabulary, t tensor-parallel ranks, M tokens of one micro-batch on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from aiscale.config import ConfigError, HFModelConfig, ModelConfig


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder-only transformer, as far as time and memory depend on it."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int = 0  #: 0: as many as heads
    ffn: int = 0  #: 0: 4 hidden
    gated: bool = False  #: SwiGLU: two matrices on the way up
    vocab: int
    tied: bool = False
    seq: int
    experts: int = 0  #: 0: one MLP for all tokens
    active_experts: int = 2

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "seq"):
            if not 1 <= getattr(self, name) <= 10**9:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least 1 and at most 10^9")
        for name in ("kv_heads", "ffn", "experts"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must not be negative")
        if self.hidden % self.heads:
            raise ConfigError(f"hidden {self.hidden} is not divisible by heads {self.heads}: change one of them")
        if self.heads % self.keys:
            raise ConfigError(f"heads {self.heads} is not divisible by kv_heads {self.keys}: change one of them")

    @property
    def keys(self) -> int:
        return self.kv_heads or self.heads

    @property
    def width(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    @property
    def qkv_width(self) -> int:
        return self.hidden + 2 * self.keys * self.head_width

    @cached_property
    def mlp_parameters(self) -> int:
        return (3 if self.gated else 2) * self.hidden * self.width

    @cached_property
    def layer_parameters(self) -> int:
        """Matrices and norms of one layer; biases, a thousandth of them, are left out."""
        mlp = self.mlp_parameters * max(1, self.experts) + self.hidden * self.experts
        return self.hidden * (self.qkv_width + self.hidden) + mlp + 2 * self.hidden

    @property
    def table_parameters(self) -> int:
        """The embedding, or the head."""
        return self.vocab * self.hidden

    @cached_property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + (1 if self.tied else 2) * self.table_parameters + self.hidden

    @cached_property
    def active_parameters(self) -> int:
        """Those that multiply a token: without the embedding, and with the experts that it passes through."""
        idle = (self.experts - self.active_experts) * self.mlp_parameters if self.experts else 0
        return self.layers * (self.layer_parameters - idle) + self.table_parameters

    def flops_per_token(self, causal: bool = False) -> float:
        """Model FLOPs forward and backward: 6 N + 12 L D s, the whole score matrix unless causal."""
        return 6 * self.active_parameters + (6 if causal else 12) * self.layers * self.hidden * self.seq

    @lru_cache(maxsize=4096)  # noqa: B019  (shapes are few)
    def layer_products(self, tokens: int, tp: int) -> tuple[tuple[int, int, int, int], ...]:
        """(rows M, columns N, inner K, how many) of one layer's products, forward."""
        up = self.width * (2 if self.gated else 1)
        rows, many = tokens, 1
        if self.experts:
            many = min(self.experts, tokens)
            rows = max(1, tokens * self.active_experts // many)
        return (
            (tokens, -(-self.qkv_width // tp), self.hidden, 1),
            (tokens, self.hidden, -(-self.hidden // tp), 1),
            (rows, -(-up // tp), self.hidden, many),
            (rows, self.hidden, -(-self.width // tp), many),
        )


def shape_of(model: ModelConfig | HFModelConfig, seq: int) -> Shape:
    """The planner's view of a model of a recipe."""
    kinds = (getattr(model, "activation", ""), getattr(model, "hidden_act", ""))
    return Shape(
        layers=model.n_layer,
        hidden=model.d_model,
        heads=model.n_head,
        kv_heads=model.kv_heads,
        ffn=model.ff_width,
        gated="swiglu" in kinds or "silu" in kinds,
        vocab=model.vocab_size,
        tied=bool(getattr(model, "tied", False)),
        seq=seq,
        experts=getattr(model, "n_expert", 0),
        active_experts=getattr(model, "experts_per_token", 2),
    )
