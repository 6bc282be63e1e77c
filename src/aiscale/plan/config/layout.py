"""The sections of a `Run` on its parallel layout and on the compression of DDP's gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aiscale.errors import (
    refuse_options_of_others,
    require,
    require_not_negative,
    require_positive,
)
from aiscale.plan.config.sections import HFModelConfig, ModelConfig

_PIPELINED = ("megatron", "pipeline")

#: option -> the strategies that have it; the others refuse it
_OPTIONS = {
    "bucket_mb": ("ddp",),
    "zero_stage": ("zero",),
    "reshard_after_forward": ("fsdp",),
    "replicas": ("fsdp",),
    "tp": ("megatron",),
    "sequence_parallel": ("megatron",),
    "ep": ("megatron",),
    "distributed_optimizer": ("ddp", "megatron"),
    "pp": _PIPELINED,
    "virtual_stages": _PIPELINED,
    "schedule": _PIPELINED,
}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The parallel layout. dp x tp x pp must equal the world size."""

    strategy: Literal["serial", "ddp", "zero", "fsdp", "pipeline", "megatron"] = "serial"
    dp: int = 0  #: data-parallel ranks; 0: as many as connect
    tp: int = 1  #: tensor-parallel ranks: each holds a shard of every matrix
    pp: int = 1  #: pipeline stages: each holds some of the layers
    ep: int = 1  #: ranks of dp x tp that share the experts of a layer
    bucket_mb: float = 25.0  #: ddp: size of the gradient buckets, MiB
    #: zero: shards 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too
    zero_stage: int = 0
    #: fsdp: free gathered parameters after the forward pass, gather them again
    reshard_after_forward: bool = True
    #: fsdp: copies of the sharded model; above 1, hybrid sharding: shards only within a copy
    replicas: int = 1
    #: order of micro-batches in a pipeline
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    #: pieces of the model that each pipeline rank holds; more than 1 only when interleaved
    virtual_stages: int = 1
    #: megatron: between tensor-parallel regions, each rank keeps T / tp tokens
    sequence_parallel: bool = False
    #: ddp, megatron: shard optimizer states over data-parallel ranks (ZeRO-1)
    distributed_optimizer: bool = False

    def __post_init__(self) -> None:
        require_positive("parallel", self, "tp pp ep bucket_mb replicas virtual_stages")
        require_not_negative("parallel", self, "dp")
        require(
            self.zero_stage in (0, 1, 2, 3),
            f"parallel.zero_stage is {self.zero_stage}: it must be 0, 1, 2 or 3",
        )
        refuse_options_of_others("parallel", self, "strategy", _OPTIONS)
        self._check_schedule()
        require(
            not self.sequence_parallel or self.tp > 1,
            "parallel.sequence_parallel needs parallel.tp above 1",
        )

    def _check_schedule(self) -> None:
        require(
            (self.virtual_stages > 1) == (self.schedule == "interleaved"),
            f"parallel.virtual_stages {self.virtual_stages} with parallel.schedule "
            f"{self.schedule}: interleaved needs at least 2, the others 1: change one of them",
        )
        require(
            self.schedule != "interleaved" or self.pp > 1,
            "parallel.schedule interleaved with parallel.pp 1: raise pp",
        )
        if self.strategy == "megatron":
            require(
                self.schedule in ("1f1b", "interleaved"),
                f"parallel.schedule {self.schedule}: Megatron-Core lacks it: set "
                "parallel.strategy=pipeline",
            )
            require(
                self.schedule != "interleaved" or self.pp > 2,
                f"parallel.schedule interleaved with parallel.pp {self.pp}: with 2 stages both "
                "neighbours are the same rank and Megatron-Core's messages cross: set pp to 3 or "
                "more, or schedule=1f1b",
            )

    def check_model(self, model: ModelConfig | HFModelConfig) -> None:
        """Raise ConfigError if `model` cannot be cut into tp x pp pieces."""
        require(
            isinstance(model, ModelConfig) or self.strategy not in _PIPELINED,
            f"parallel.strategy {self.strategy} cuts our own GPT, not Hugging Face's: use zero, "
            "fsdp or ddp",
        )
        cut = {"n_head": model.n_head, "n_kv_head": model.kv_heads, "d_ff": model.ff_width}
        for name, value in cut.items():
            require(
                value % self.tp == 0,
                f"model.{name} {value} is not divisible by parallel.tp {self.tp}: change one of "
                "them",
            )
        pieces = self.pp * self.virtual_stages
        require(
            model.n_layer % pieces == 0,
            f"model.n_layer {model.n_layer} is not divisible by parallel.pp {self.pp} x "
            f"virtual_stages {self.virtual_stages} = {pieces}: every stage needs as many layers: "
            "change one of them",
        )

    def check_micro_batches(self, n_micro: int) -> None:
        """Raise ConfigError if the schedule does not allow `n_micro` micro-batches in a step."""
        few = self.strategy == "pipeline" and self.schedule == "1f1b" and n_micro < self.pp
        odd = self.schedule in ("interleaved", "zero-bubble") and n_micro % self.pp
        require(
            not few and not odd,
            f"{n_micro} micro-batches a step with parallel.pp {self.pp}: the {self.schedule} "
            f"schedule needs {'one for every stage' if few else 'a multiple of pp'}: change the "
            f"size of a micro-batch so that there are {-(-n_micro // self.pp) * self.pp}",
        )

    def data_parallel(self, world_size: int) -> int:
        """The number of data-parallel ranks in a world of `world_size`.

        Raises ConfigError if it does not fit.
        """
        cut = self.tp * self.pp
        require(
            self.strategy != "serial" or world_size == 1,
            f"parallel.strategy serial uses 1 rank, but this job has {world_size}: start 1, or "
            "use ddp",
        )
        dp = self.dp or max(1, world_size // cut)
        require(
            dp * cut == world_size,
            f"dp {dp} x tp {self.tp} x pp {self.pp} = {dp * cut} ranks, but this job has "
            f"{world_size}: change one of them, or start {dp * cut}",
        )
        require(
            dp % self.replicas == 0,
            f"parallel.replicas {self.replicas} does not divide the {dp} data-parallel ranks: "
            "change one of them",
        )
        return dp


# Compressed gradients ----------------------------------------------------------------------------

#: option -> the methods that have it; the others refuse it
_METHOD_OPTIONS = {
    "overlap": ("none", "radius"),
    "density": ("radius", "top-k"),
    "warmup_steps": ("radius", "top-k", "powersgd"),
    "interval": ("radius",),
    "range": ("radius",),
    "residual": ("radius",),
    "whole": ("radius",),
    "rank": ("powersgd",),
}


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """How DDP compresses gradients."""

    method: Literal["none", "radius", "top-k", "powersgd"] = "none"
    wire: Literal["same", "bf16"] = "same"  #: precision on the wire: the gradients' own, or bf16
    #: send each full bucket during the backward pass; false: send all at once after it
    overlap: bool = True
    #: share of each tensor's entries that is sent, k = max(floor(density x numel), 1)
    density: float = 0.4
    warmup_steps: int = 0  #: dense steps before the first sparse one
    interval: int = 200  #: radius: every interval-th step is dense and chooses a new mask (T)
    #: radius: also choose the neighbours of each chosen entry up to this distance (r)
    range: int = 0
    #: radius: how unsent gradients (and with wire=bf16 rounding errors) are sent later: summed,
    #: averaged, or not at all
    residual: Literal["sum", "mean", "none"] = "sum"
    #: radius: what is always sent; vectors: also the norms' weights
    whole: Literal["biases", "vectors"] = "biases"
    rank: int = 4  #: powersgd: rank of a matrix's two factors

    def __post_init__(self) -> None:
        refuse_options_of_others("compression", self, "method", _METHOD_OPTIONS)
        require(
            0 < self.density <= 1,
            f"compression.density is {self.density}: it is the share of entries that is sent, "
            "above 0 and at most 1",
        )
        require_positive("compression", self, "interval rank")
        require_not_negative("compression", self, "range warmup_steps")

    @property
    def is_default(self) -> bool:
        return self == CompressionConfig()
