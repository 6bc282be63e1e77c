"""Tensor, pipeline and data parallelism by Megatron-Core (see `engine`)."""

from aiscale.parallel.megatron.engine import MegatronEngine, preload
from aiscale.parallel.megatron.shards import weights
from aiscale.parallel.megatron.timers import ScheduleTrace, passes

__all__ = ["MegatronEngine", "ScheduleTrace", "passes", "preload", "weights"]
