"""Data parallelism by torch's DistributedDataParallel: gradients travel in buckets while the backward pass goes on.

The three steps from serial to DDP are `_loss` (the forward pass goes through the wrapper, which resets the buckets),
`_accumulating` (`no_sync`: only the last micro-batch's backward pass communicates) and nothing else: DDP's hooks
average the gradients as they appear.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from aiscale.config import Run
from aiscale.dist import World
from aiscale.parallel.serial import Engine


class DDPEngine(Engine):
    """The whole model on every rank, a share of the global batch each, gradients averaged by DDP."""

    def __init__(self, run: Run, world: World) -> None:
        super().__init__(run, world)
        layout = run.parallel
        with world.control():  # DDP sends the parameters of rank 0 to all when it is built
            self.module = DistributedDataParallel(
                self.model,
                bucket_cap_mb=layout.bucket_mb,
                static_graph=layout.static_graph,
                gradient_as_bucket_view=layout.gradient_as_bucket_view,
            )
        # A static graph is learnt from the first backward pass, and only from one that communicates.
        self._must_learn_graph = layout.static_graph
        if run.compression.wire == "bf16":
            self.module.register_comm_hook(None, average_in_bf16)

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.module(tokens, targets)

    def _accumulating(self, is_last: bool):
        if is_last or self._must_learn_graph:
            self._must_learn_graph = False
            return nullcontext()
        return self.module.no_sync()

    def close(self) -> None:
        del self.module  # it holds the process group
        super().close()


def average_in_bf16(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A DDP hook that sends gradients as bf16, half the bytes of fp32, and hands them back in their own precision.

    torch's own `bf16_compress_hook` refuses gloo, so this one is used on every backend. Dividing before the sum keeps
    it inside bf16's range.
    """
    buffer = bucket.buffer()
    packed = (buffer / dist.get_world_size()).to(torch.bfloat16)
    sent = dist.all_reduce(packed, async_op=True).get_future()
    return sent.then(lambda done: buffer.copy_(done.value()[0]))
