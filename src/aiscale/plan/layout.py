"""How a model is cut over ranks, and what the software does: all that the formulas read."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from aiscale.errors import ConfigError, hint
from aiscale.plan.config import HFModelConfig, ModelConfig, Run
from aiscale.plan.cost.parameters import check_dense
from aiscale.plan.presets import model_of, presets


class StageShape(NamedTuple):
    """What one pipeline rank holds."""

    layers: int
    embedding: bool
    head: bool


@dataclass(frozen=True, kw_only=True)
class Software:
    """What the training program does; the defaults: a present-day eager PyTorch program."""

    flash: bool = True  #: attention without the score matrix in memory
    #: its generation: FlashAttention 1 and Triton's of its time; 2; 3 and cuDNN's
    attention: int = 2
    #: torch.compile, XLA or hand-written fused kernels: fewer launches, fewer bytes
    compiled: bool = False
    #: loss and gradient are one kernel that works in the logits' place, without an fp32 copy
    fused_loss: bool = False
    overlap: bool = True  #: gradients are exchanged during the backward pass
    #: bytes of norms, activations and additions over those of an eager layer with biases, dropout
    traffic: float = 1.0
    #: softmax, GELU and the like are one kernel each; False: as ROCm had them in 2022
    fused_kernels: bool = True
    #: tensor-parallel exchange beside products: none; async; backward: beside the weights'
    #: gradients, as Megatron since 2022; pipelined: in pieces
    tp_overlap: str = "async"
    #: a sharded optimizer's weights return during the next forward pass
    gather_overlap: bool = False
    #: twice the host's time a layer, in pipelines more by tensor-parallel peers: nanotron
    slow_host: bool = False
    fp32_gradients: bool = True  #: gradients are accumulated and exchanged in 4 bytes
    #: products add to these at once, as Megatron's: none in 2 bytes stand beside them
    fused_gradients: bool = False
    fused_optimizer: bool = False
    fused_swiglu: bool = False  #: SwiGLU keeps its input and its output, and not what lies between
    #: one fp32 copy of the logits becomes softmax, then gradient: Megatron's
    loss_in_place: bool = False
    #: without a pipeline, what tensor parallelism gathers stays: nanotron
    gathered_kept: bool = False
    program: str = ""  #: one of PROGRAMS, if it is that one itself
    #: DeepSpeed's ZeRO-3 of 2021: one all-gather a tensor, not one a layer
    per_tensor_gather: bool = False
    #: sharded states come back by one broadcast an owner, not by one all-gather
    broadcasts: bool = False
    shard_ranks: int = 0  #: ranks over which states are divided; 0: all data-parallel ranks
    regather: bool = True  #: fsdp: gather again in the backward pass
    #: of layers over stages: even; cost: by cumulative cost, with the head; auto: see stages()
    split: str = "auto"
    #: held for exchange; DeepSpeed's ZeRO: two buckets of 5 x 10^8 entries
    bucket_bytes: float = 0.0
    #: whose memory: what torch has given out; reserved: what its allocator keeps; smi: with context
    #: and communicators
    counter: str = "torch"


#: Programs of which other runs than the planned one were fitted.
PROGRAMS = {
    "megatron": Software(
        program="megatron",
        fused_gradients=True,
        fused_optimizer=True,
        fused_swiglu=True,
        loss_in_place=True,
        tp_overlap="backward",
        traffic=0.8,
    ),
    "nanotron": Software(program="nanotron", slow_host=True, gathered_kept=True),
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to run a model on some ranks."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1  #: context-parallel ranks: each holds seq / cp tokens
    virtual_stages: int = 1
    schedule: Literal["1f1b", "interleaved", "gpipe", "zero-bubble"] = "1f1b"
    micro_batch: int = 1
    global_batch: int = 1
    zero_stage: int = 0
    fsdp: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    sequence_parallel: bool = False
    precision: str = "bf16"
    density: float = 1.0  #: Radius: share of gradient entries that are sent in a sparse step
    period: int = 200  #: Radius: steps between refreshes of the chosen entries
    software: Software = Software()

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def micro_batches(self) -> int:
        return max(1, round(self.global_batch / (self.dp * self.micro_batch)))

    @property
    def wide(self) -> int:
        """Bytes of a weight, of an activation, and of what is sent of them."""
        return 4 if self.precision in ("fp32", "tf32") else 2

    @property
    def wide_gradient(self) -> int:
        """Bytes of a gradient, in memory and on the wire."""
        return 4 if self.software.fp32_gradients else self.wide

    @property
    def replicas(self) -> int:
        """Ranks among which gradients are averaged."""
        return self.dp * self.cp

    @property
    def state_shards(self) -> int:
        """Ranks over which optimizer states are divided."""
        sharded = self.zero_stage or self.fsdp
        return min(self.software.shard_ranks or self.replicas, self.replicas) if sharded else 1

    @property
    def shards_weights(self) -> bool:
        return self.fsdp or self.zero_stage == 3

    def stages(self, shape: Shape) -> tuple[StageShape, ...]:
        """The layers of each pipeline rank.

        By cost as nanotron: a stage ends behind the layer at which the cumulative cost passes its
        share, and the head counts as the layers that it costs as much as. auto: by cost where the
        head costs at least half a layer, even otherwise.
        """
        return _stages(shape, self.pp, self.software.split)

    def name(self) -> str:
        parts = [f"dp {self.dp}", f"tp {self.tp}", f"pp {self.pp}"]
        parts += [f"cp {self.cp}"] if self.cp > 1 else []
        parts += [f"v {self.virtual_stages}"] if self.virtual_stages > 1 else []
        parts += ["fsdp"] if self.fsdp else [f"zero {self.zero_stage}"]
        return ", ".join([*parts, f"micro-batch {self.micro_batch}", f"recompute {self.recompute}"])

    def option(self) -> str:
        """The text for `aiscale plan --layout` that names this layout again."""
        always = ("dp", "tp", "pp", "micro_batch")
        # they have options of their own, or none
        elsewhere = ("global_batch", "precision", "software")
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in elsewhere:
                continue
            if field.name in always or value != field.default:
                words.append(f"{field.name}={value}")
        return ",".join(words)

    def check(self, shape: Shape) -> None:
        """Raise ConfigError where the pieces do not fit together."""
        for name in (
            "dp",
            "tp",
            "pp",
            "cp",
            "virtual_stages",
            "micro_batch",
            "global_batch",
            "period",
        ):
            if not 1 <= getattr(self, name) <= 10**8:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}: it must be at least 1 and at most 10^8"
                )
        if self.zero_stage not in (0, 1, 2, 3):
            raise ConfigError(f"zero_stage is {self.zero_stage}: it must be 0, 1, 2 or 3")
        if self.schedule == "zero-bubble" and self.virtual_stages > 1:
            raise ConfigError(
                f"virtual_stages {self.virtual_stages} with zero-bubble: it takes one piece a rank"
            )
        if not 0 < self.density <= 1:
            raise ConfigError(f"density is {self.density}: it must be above 0 and at most 1")
        if self.tp > shape.heads:
            raise ConfigError(
                f"tp {self.tp} exceeds heads {shape.heads}: a rank needs a head at least"
            )
        if self.pp * self.virtual_stages > shape.layers + 2:
            raise ConfigError(
                f"pp {self.pp} x virtual_stages {self.virtual_stages} = "
                f"{self.pp * self.virtual_stages} pieces, but there are {shape.layers} layers, "
                "an embedding and a head: lower one of them"
            )
        if self.global_batch < self.dp * self.micro_batch:
            raise ConfigError(
                f"dp {self.dp} x micro_batch {self.micro_batch} = "
                f"{self.dp * self.micro_batch} sequences, but global_batch is "
                f"{self.global_batch}: lower one of them, or raise the batch"
            )


@lru_cache(maxsize=4096)
def _stages(shape: Shape, pp: int, split: str) -> tuple[StageShape, ...]:
    head = shape.table_parameters / (shape.layer_parameters - 2 * shape.hidden)
    if split == "even" or (split == "auto" and head < 0.5) or pp == 1:
        base, more = divmod(shape.layers, pp)
        # the last stage has the head, so a spare layer goes to others first
        end = pp - 1 if head >= 0.1 else pp
        counts = [base + (1 if end - more <= i < end else 0) for i in range(pp)]
        return tuple(StageShape(n, i == 0, i == pp - 1) for i, n in enumerate(counts))
    counts, at = [0] * pp, 0
    for cost in range(1, shape.layers + 1):
        counts[at] += 1
        if cost > (shape.layers + head) * (at + 1) / pp and at + 1 < pp:
            at += 1
    return tuple(StageShape(n, i == 0, i == at) for i, n in enumerate(counts))


# Shapes ------------------------------------------------------------------------------------------
# D hidden, F width of the MLP, V vocabulary, t tensor-parallel ranks, M tokens of one micro-batch
# on one rank.


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

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "seq"):
            if not 1 <= getattr(self, name) <= 10**9:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}: it must be at least 1 and at most 10^9"
                )
        for name in ("kv_heads", "ffn"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must not be negative")
        if self.hidden % self.heads:
            raise ConfigError(
                f"hidden {self.hidden} is not divisible by heads {self.heads}: change one of them"
            )
        if self.heads % self.keys:
            raise ConfigError(
                f"heads {self.heads} is not divisible by kv_heads {self.keys}: change one of them"
            )

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
    def layer_parameters(self) -> int:
        """Matrices and norms of one layer; biases, a thousandth of them, are left out."""
        mlp = (3 if self.gated else 2) * self.hidden * self.width
        return self.hidden * (self.qkv_width + self.hidden) + mlp + 2 * self.hidden

    @property
    def table_parameters(self) -> int:
        """The embedding, or the head."""
        return self.vocab * self.hidden

    @cached_property
    def parameters(self) -> int:
        return (
            self.layers * self.layer_parameters
            + (1 if self.tied else 2) * self.table_parameters
            + self.hidden
        )

    def flops_per_token(self) -> float:
        """Model FLOPs forward and backward: 6 N + 12 L D s (all scores), without the embedding."""
        multiplied = self.layers * self.layer_parameters + self.table_parameters
        return 6 * multiplied + 12 * self.layers * self.hidden * self.seq

    @lru_cache(maxsize=4096)  # noqa: B019  (shapes are few)
    def layer_products(self, tokens: int, tp: int) -> tuple[tuple[int, int, int], ...]:
        """(rows M, columns N, inner K) of one layer's products, forward."""
        up = self.width * (2 if self.gated else 1)
        return (
            (tokens, -(-self.qkv_width // tp), self.hidden),
            (tokens, self.hidden, -(-self.hidden // tp)),
            (tokens, -(-up // tp), self.hidden),
            (tokens, self.hidden, -(-self.width // tp)),
        )


LLAMA_3 = {"kv_heads": 8, "gated": True, "vocab": 128256, "seq": 8192}
#: Shapes that no preset has, by the names people use.
SHAPES: dict[str, Shape] = {
    "gpt3-175b": Shape(layers=96, hidden=12288, heads=96, vocab=51200, tied=True, seq=2048),
    "bloom-176b": Shape(layers=70, hidden=14336, heads=112, vocab=250880, tied=True, seq=2048),
    "llama-8b": Shape(layers=32, hidden=4096, heads=32, ffn=14336, **LLAMA_3),
    "llama-70b": Shape(layers=80, hidden=8192, heads=64, ffn=28672, **LLAMA_3),
    "llama-405b": Shape(layers=126, hidden=16384, heads=128, ffn=53248, **LLAMA_3),
}


def shape_of(model: ModelConfig | HFModelConfig, seq: int) -> Shape:
    """The planner's view of a model. Raises ConfigError where our GPT has no such shape."""
    check_dense(model)
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


def layout_of(run: Run, gpus: int) -> Layout:
    """A run as the planner sees it, over so many devices; raises ConfigError if it does not fit."""
    parallel, compression, dp = run.parallel, run.compression, run.check_world(gpus)
    same = ("tp", "pp", "virtual_stages", "schedule", "sequence_parallel")
    return Layout(
        dp=dp,
        micro_batch=run.loop.micro_batches(dp)[1],
        global_batch=run.loop.global_batch,
        **{name: getattr(parallel, name) for name in same},
        zero_stage=parallel.zero_stage or int(parallel.distributed_optimizer),
        fsdp=parallel.strategy == "fsdp",
        recompute="full" if run.model.activation_checkpointing else "none",
        precision=run.loop.precision,
        density=compression.density if compression.method == "radius" else 1.0,
        period=compression.interval,
    )
