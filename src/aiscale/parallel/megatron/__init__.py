"""Tensor, pipeline and data parallelism by Megatron-Core (see `engine`)."""

from aiscale.parallel.megatron.engine import MegatronEngine, preload
from aiscale.parallel.megatron.shards import weights
