"""How a model is cut over ranks, and what the software does: all that the formulas read.

The model itself is a `shape.Shape`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal, NamedTuple

from aiscale.errors import ConfigError
from aiscale.plan.config import Run
from aiscale.plan.shape import SHAPES, Shape, shape_named, shape_of

__all__ = [
    "PROGRAMS",
    "SHAPES",
    "Layout",
    "Shape",
    "Software",
    "StageShape",
    "layout_of",
    "shape_named",
    "shape_of",
]


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
    #: a sharded optimizer cuts each tensor for each owner, and copies piece by piece: nanotron
    shard_copies: bool = False
    shard_ranks: int = 0  #: ranks over which states are divided; 0: all data-parallel ranks
    regather: bool = True  #: fsdp: gather again in the backward pass
    #: alltoall: a token is sent once for each of its experts; by node: once to each node that has
    #: any of them, and copied there (DeepEP, HybridEP)
    dispatch: str = "alltoall"
    ep_overlap: bool = False  #: tokens travel while another micro-batch computes (DualPipe)
    fp8_dispatch: bool = False  #: tokens travel to their experts in one byte an entry
    #: one kernel multiplies for all experts of a rank; False: each has kernels of its own
    grouped: bool = True
    #: tokens are ordered while they are sent, not before and after
    fused_order: bool = False
    graphed: bool = False  #: CUDA graphs of whole steps: the host launches nothing else
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
        grouped=False,
    ),
    "nanotron": Software(program="nanotron", slow_host=True, gathered_kept=True, shard_copies=True),
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to run a model on some ranks."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1  #: context-parallel ranks: each holds seq / cp tokens
    #: how they exchange: keys and values around a ring, or tokens for heads (all to all, Ulysses)
    cp_kind: Literal["ring", "all-to-all"] = "ring"
    ep: int = 1  #: expert-parallel ranks: each holds experts / ep of a layer
    etp: int = 1  #: tensor-parallel ranks inside an expert
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
    def expert_replicas(self) -> int:
        """Ranks among which gradients of experts are summed.

        Megatron-Core lays two grids over the ranks of a stage: dp x cp x tp for what every token
        meets, and edp x ep x etp for experts.
        """
        return max(1, self.replicas * self.tp // (self.ep * self.etp))

    @property
    def expert_shards(self) -> int:
        """Ranks over which the optimizer states of experts are divided."""
        return self.expert_replicas if self.zero_stage or self.fsdp else 1

    @property
    def expert_tokens_divisor(self) -> int:
        """Ranks of tp among which the tokens of a micro-batch are divided before they are sent."""
        return self.tp if self.sequence_parallel else 1

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
        parts += [f"ep {self.ep}"] if self.ep > 1 else []
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
            "ep",
            "etp",
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
        self._check_experts(shape)
        if self.cp_kind == "all-to-all" and shape.heads % (self.tp * self.cp):
            raise ConfigError(
                f"heads {shape.heads} / (tp {self.tp} x cp {self.cp}) is not whole: "
                "all-to-all gives each rank whole heads: lower cp, or take cp_kind=ring"
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

    def _check_experts(self, shape: Shape) -> None:
        if not shape.experts:
            if self.ep * self.etp > 1:
                raise ConfigError(
                    f"ep {self.ep} x etp {self.etp}, but the model has no experts: set both to 1"
                )
            return
        if shape.experts % self.ep:
            raise ConfigError(
                f"{shape.experts} experts are not divisible by ep {self.ep}: change one of them"
            )
        ranks = self.replicas * self.tp
        if ranks % (self.ep * self.etp):
            raise ConfigError(
                f"ep {self.ep} x etp {self.etp} does not divide dp {self.dp} x cp {self.cp} x "
                f"tp {self.tp} = {ranks} ranks of a stage: lower ep or etp"
            )


@lru_cache(maxsize=4096)
def _stages(shape: Shape, pp: int, split: str) -> tuple[StageShape, ...]:
    # by what a token costs: of experts, those that it is sent to
    idle = shape.expert_share * (shape.experts - shape.top_k) * shape.one_expert
    head = shape.table_parameters / (shape.layer_parameters - idle - 2 * shape.hidden)
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


def layout_of(run: Run, gpus: int) -> Layout:
    """A run as the planner sees it, over so many devices; raises ConfigError if it does not fit."""
    parallel, compression, dp = run.parallel, run.compression, run.check_world(gpus)
    same = ("tp", "pp", "virtual_stages", "schedule", "sequence_parallel", "ep")
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
