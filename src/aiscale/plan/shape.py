"""A decoder-only transformer, as far as time and memory depend on it; models by name.

    shape_named("deepseek-v3").active_parameters     # of those, what one token meets
    Shape(layers=24, hidden=2048, heads=16, vocab=51200, seq=2048, experts=64, top_k=8)

Letters: D hidden, F width of the MLP, E experts, k experts that a token is sent to, V vocabulary,
t tensor-parallel ranks. A model that mixes dense layers and layers of experts is taken as so many
mean layers: every sum over the layers is exact, and stages differ a little more than here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from aiscale.errors import ConfigError, hint
from aiscale.plan.config import HFModelConfig, ModelConfig
from aiscale.plan.presets import model_of, presets

#: Fields that must be at least 1, and those that may be 0: "as the model without it".
SIZES = ("layers", "hidden", "heads", "vocab", "seq")
OPTIONAL = (
    "kv_heads",
    "ffn",
    "head_dim",
    "experts",
    "top_k",
    "expert_ffn",
    "shared_experts",
    "dense_layers",
    "q_rank",
    "kv_rank",
    "rope_width",
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model and the tokens of one sequence."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int = 0  #: 0: as many as heads
    ffn: int = 0  #: 0: 4 hidden
    gated: bool = False  #: SwiGLU: two matrices on the way up
    vocab: int
    tied: bool = False
    seq: int
    head_dim: int = 0  #: 0: hidden / heads
    experts: int = 0  #: of a layer; 0: no experts
    top_k: int = 0  #: experts that a token is sent to
    expert_ffn: int = 0  #: width of one expert; 0: ffn
    shared_experts: int = 0  #: experts of that width that every token meets
    dense_layers: int = 0  #: the first layers, which have an MLP instead of experts
    #: tokens that an expert takes over those of a balanced router; 0: all, and the router balances
    capacity: float = 0.0
    q_rank: int = 0  #: latent attention (MLA): width of the compressed queries
    kv_rank: int = 0  #: the same of keys and values; 0: no latent attention
    rope_width: int = 0  #: the same: rotated entries of a head, beside head_dim

    def __post_init__(self) -> None:
        for name in SIZES:
            if not 1 <= getattr(self, name) <= 10**9:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}: it must be at least 1 and at most 10^9"
                )
        for name in OPTIONAL:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must not be negative")
        if not self.head_dim and self.hidden % self.heads:
            raise ConfigError(
                f"hidden {self.hidden} is not divisible by heads {self.heads}: change one of them"
            )
        if self.heads % self.keys:
            raise ConfigError(
                f"heads {self.heads} is not divisible by kv_heads {self.keys}: change one of them"
            )
        self._check_experts()

    def _check_experts(self) -> None:
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise ConfigError(
                f"top_k {self.top_k} of {self.experts} experts: "
                f"it must be at least 1 and at most {self.experts}"
            )
        if self.top_k and not self.experts:
            raise ConfigError(f"top_k {self.top_k} without experts: set experts, or leave it out")
        if self.dense_layers > self.layers:
            raise ConfigError(f"dense_layers {self.dense_layers} of {self.layers} layers: lower it")
        if not 0 <= self.capacity < 1000:
            raise ConfigError(
                f"capacity is {self.capacity}: it must be 0 (no token is dropped), or about 1"
            )

    # attention ------------------------------------------------------------------------------------

    @property
    def keys(self) -> int:
        return self.kv_heads or self.heads

    @property
    def latent(self) -> bool:
        """Multi-head latent attention (MLA), as DeepSeek-V3's."""
        return self.kv_rank > 0

    @property
    def head_width(self) -> int:
        """Entries of a value, and of a key without its rotated part."""
        return self.head_dim or self.hidden // self.heads

    @property
    def score_width(self) -> float:
        """Entries of a head that one score costs, the mean of q k and of its product with v."""
        return self.head_width + self.rope_width / 2

    @property
    def heads_width(self) -> int:
        """Entries that leave attention: of all heads."""
        return self.heads * self.head_width

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.keys) * self.head_width

    def attention_matrices(self, tp: int) -> tuple[tuple[int, int], ...]:
        """(columns, inner) of attention's products on a rank, without the scores."""
        D = self.hidden
        if not self.latent:
            return ((-(-self.qkv_width // tp), D), (D, -(-self.heads_width // tp)))
        heads = -(-self.heads // tp)
        full = self.head_width + self.rope_width
        queries = ((self.q_rank, D), (heads * full, self.q_rank))
        if not self.q_rank:
            queries = ((heads * full, D),)
        return (
            *queries,
            (self.kv_rank + self.rope_width, D),
            (heads * 2 * self.head_width, self.kv_rank),
            (D, heads * self.head_width),
        )

    @property
    def attention_kept(self) -> float:
        """Entries per token that attention keeps for the backward pass: q, k, v and its output.

        Latent attention keeps what it compressed, too. k and v of grouped queries are fewer; each
        is kept twice, once before it is rotated or copied.
        """
        if self.latent:
            full = self.head_width + self.rope_width
            small = self.q_rank + self.kv_rank + self.rope_width
            return small + self.heads * (2 * full + 2 * self.head_width)
        return 2 * (1 + self.keys / self.heads) * self.heads_width

    # MLP and experts ------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def expert_width(self) -> int:
        return self.expert_ffn or self.width

    @property
    def expert_share(self) -> float:
        """Share of the layers that have experts."""
        return (self.layers - self.dense_layers) / self.layers if self.experts else 0.0

    @property
    def dense_width(self) -> float:
        """Width of what every token meets: MLP or shared experts, the mean over layers."""
        shared = self.shared_experts * self.expert_width
        return (1 - self.expert_share) * self.width + self.expert_share * shared

    @property
    def matrices(self) -> int:
        """Of an MLP or an expert."""
        return 3 if self.gated else 2

    # parameters -----------------------------------------------------------------------------------

    @cached_property
    def dense_parameters(self) -> float:
        """Of one layer what every token meets: attention, MLP or shared experts, router, norms."""
        attention = sum(columns * inner for columns, inner in self.attention_matrices(1))
        mlp = self.matrices * self.hidden * self.dense_width
        router = self.expert_share * self.hidden * self.experts
        return round(attention + mlp + router + 2 * self.hidden)

    @cached_property
    def one_expert(self) -> int:
        """Parameters of one expert."""
        return self.matrices * self.hidden * self.expert_width

    @cached_property
    def expert_parameters(self) -> float:
        """Of all experts of one layer, the mean over layers."""
        return self.expert_share * self.experts * self.one_expert

    @cached_property
    def layer_parameters(self) -> float:
        """Matrices and norms of one layer; biases, a thousandth of them, are left out."""
        return self.dense_parameters + self.expert_parameters

    @property
    def table_parameters(self) -> int:
        """The embedding, or the head."""
        return self.vocab * self.hidden

    @cached_property
    def parameters(self) -> float:
        tables = (1 if self.tied else 2) * self.table_parameters
        return round(self.layers * self.layer_parameters) + tables + self.hidden

    @cached_property
    def active_parameters(self) -> float:
        """Of those, what one token meets."""
        idle = self.expert_share * (self.experts - self.top_k) * self.one_expert
        return self.parameters - round(self.layers * idle)

    def flops_per_token(self) -> float:
        """Model FLOPs forward and backward: 6 N + 12 L D s, of the parameters that a token meets.

        All scores are counted, causal or not; the embedding is not.
        """
        active = self.dense_parameters + self.expert_share * self.top_k * self.one_expert
        multiplied = self.layers * active + self.table_parameters
        return 6 * multiplied + 12 * self.layers * self.heads * self.score_width * self.seq

    @lru_cache(maxsize=4096)  # noqa: B019  (shapes are few)
    def layer_products(self, tokens: int, tp: int) -> tuple[tuple[int, int, int], ...]:
        """(rows M, columns N, inner K) of one layer's products, forward, without routed experts."""
        shapes = [(tokens, *matrix) for matrix in self.attention_matrices(tp)]
        width = round(self.dense_width)
        if width:
            up = width * (self.matrices - 1)
            shapes.append((tokens, -(-up // tp), self.hidden))
            shapes.append((tokens, self.hidden, -(-width // tp)))
        if self.expert_share:
            shapes.append((tokens, self.experts, self.hidden))
        return tuple(shapes)


# Models by name ----------------------------------------------------------------------------------

LLAMA_3 = {"kv_heads": 8, "gated": True, "vocab": 128256, "seq": 8192}
QWEN_3 = {"kv_heads": 4, "head_dim": 128, "gated": True, "vocab": 151936, "seq": 4096}
MIXTRAL = {"kv_heads": 8, "gated": True, "vocab": 32000, "seq": 4096, "experts": 8, "top_k": 2}
#: Shapes that no preset has, by the names people use; of their config.json.
SHAPES: dict[str, Shape] = {
    "gpt3-175b": Shape(layers=96, hidden=12288, heads=96, vocab=51200, tied=True, seq=2048),
    "bloom-176b": Shape(layers=70, hidden=14336, heads=112, vocab=250880, tied=True, seq=2048),
    "llama-8b": Shape(layers=32, hidden=4096, heads=32, ffn=14336, **LLAMA_3),
    "llama-70b": Shape(layers=80, hidden=8192, heads=64, ffn=28672, **LLAMA_3),
    "llama-405b": Shape(layers=126, hidden=16384, heads=128, ffn=53248, **LLAMA_3),
    "mixtral-8x7b": Shape(layers=32, hidden=4096, heads=32, ffn=14336, **MIXTRAL),
    "mixtral-8x22b": Shape(layers=56, hidden=6144, heads=48, ffn=16384, **MIXTRAL),
    "olmoe-1b-7b": Shape(
        layers=16, hidden=2048, heads=16, ffn=1024, gated=True, vocab=50304, seq=4096,
        experts=64, top_k=8,
    ),
    "qwen3-30b-a3b": Shape(
        layers=48, hidden=2048, heads=32, ffn=6144, experts=128, top_k=8, expert_ffn=768, **QWEN_3
    ),
    "qwen3-235b-a22b": Shape(
        layers=94, hidden=4096, heads=64, ffn=12288, experts=128, top_k=8, expert_ffn=1536, **QWEN_3
    ),
    "gpt-oss-120b": Shape(
        layers=36, hidden=2880, heads=64, kv_heads=8, head_dim=64, ffn=2880, gated=True,
        vocab=201088, seq=4096, experts=128, top_k=4,
    ),
    "deepseek-v3": Shape(
        layers=61, hidden=7168, heads=128, head_dim=128, ffn=18432, gated=True, vocab=129280,
        seq=4096, experts=256, top_k=8, expert_ffn=2048, shared_experts=1, dense_layers=3,
        q_rank=1536, kv_rank=512, rope_width=64,
    ),
}  # fmt: skip


def shape_of(model: ModelConfig | HFModelConfig, seq: int) -> Shape:
    """The planner's view of a model. Raises ConfigError where our GPT has no such shape."""
    model = model.shape if isinstance(model, HFModelConfig) else model
    return Shape(
        layers=model.n_layer,
        hidden=model.d_model,
        heads=model.n_head,
        kv_heads=model.kv_heads,
        ffn=model.ff_width,
        gated=model.gated,
        vocab=model.vocab_size,
        tied=model.tied,
        seq=seq,
    )


def shape_named(name: str) -> Shape:
    """Of a preset, or one of SHAPES."""
    if name in SHAPES:
        return SHAPES[name]
    if name not in presets():
        known = [*SHAPES, *presets()]
        raise ConfigError(f"unknown model {name!r}: {hint(name.lower(), known)}")
    return shape_of(model_of(name), presets()[name]["context"])
