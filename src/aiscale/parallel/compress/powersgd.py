"""PowerSGD (Vogels et al. 2019) with torch's own hook: a gradient matrix is sent as two low-rank factors.

    aiscale train --recipe laptop --nproc 4 --set parallel.strategy=ddp --set compression.method=powersgd

The hook's callbacks wait for further all-reduces on gloo's two threads, so that two buckets deadlock: on gloo, one DDP
bucket holds the whole model. The first two steps are dense: torch needs DDP's final buckets first. Errors and factors
are not saved: a resumed run begins with two dense steps again.
"""

# No `from __future__ import annotations` here: DDP checks its hook's annotations, which must be types, not strings.

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from aiscale.config import ConfigError, Run
from aiscale.cost.compression import FIRST_POWERSGD_STEP
from aiscale.distributed import World
from aiscale.parallel.compress.base import Compressor

_MIB = 2**20
_EPSILON = 1e-8  # for a gradient of zeros, whose factors would be 0 / 0


class PowerSGD(Compressor):
    """torch's PowerSGD."""

    keeps_state = False

    def __init__(self, run: Run, world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(run, world, model, optimizer)
        config = run.compression
        if config.wire != "same":
            raise ConfigError(
                f"compression.wire {config.wire} with compression.method powersgd: torch's hook sends its factors "
                "in the gradients' own precision: set wire=same"
            )
        self.powersgd = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=config.rank,
            start_powerSGD_iter=max(FIRST_POWERSGD_STEP, config.warmup_steps),
            orthogonalization_epsilon=_EPSILON,
            random_seed=run.loop.seed,
        )

    @property
    def bucket_mb(self) -> float:
        """MiB of DDP's buckets; one bucket for all on gloo."""
        asked, needed = self.run.parallel.bucket_mb, sum(parameter.nbytes for parameter in self.names) / _MIB + 1
        return max(asked, needed) if self.world.backend == "gloo" else asked

    def hook(self, bucket: dist.GradBucket) -> Future[Tensor]:
        self.check_finite(bucket.parameters(), bucket.gradients())
        return powerSGD_hook(self.powersgd, bucket)

    def tensors(self) -> dict[str, list[Tensor]]:
        memory = (self.powersgd.error_dict, self.powersgd.p_memory_dict, self.powersgd.q_memory_dict)
        return {"compression": [tensor for by_bucket in memory for tensor in by_bucket.values()]}
