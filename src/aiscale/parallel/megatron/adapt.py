"""Run Megatron-Core on a CPU: inside `adapted`, the few places where it assumes CUDA are redirected.

Megatron-Core does not support fp64: its cross-entropy and its router's softmax cast to fp32. With double=True they do
not, on any device.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _CudaMeansCpu(TorchFunctionMode):
    """Redirects CUDA requests to the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if isinstance(device, str | torch.device) and torch.device(device).type == "cuda":
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Its optimizers recognize precisions by names such as torch.cuda.FloatTensor.
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


class _SoftmaxKeepsDouble(TorchFunctionMode):
    """Keeps torch.softmax from narrowing fp64 to fp32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.softmax and args[0].dtype is torch.float64:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def _replacements() -> list[tuple[object, str, object]]:
    """(object, attribute, replacement on the CPU)."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import random

    return [
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "synchronize", lambda *_, **__: None),
        (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        (torch.cuda, "manual_seed", torch.manual_seed),
        # Where a rank hands itself what it wrote. Else each starts a process for it, with all imports: five seconds.
        (filesystem_async, "_results_queue", SimpleQueue()),
        (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
    ]


@contextmanager
def adapted(device: torch.device, *, double: bool = False) -> Iterator[None]:
    """Make Megatron-Core run on `device`, in fp64 if `double`, until the context ends."""
    with ExitStack() as stack, warnings.catch_warnings():
        # Hide what only Megatron-Core's authors can act on: advice on fused kernels and CUDA settings, deprecations.
        warnings.filterwarnings("ignore", module="megatron")
        warnings.filterwarnings("ignore", ".*torch.distributed.*deprecated|Please use DTensor", FutureWarning)
        # Without masters, the distributed optimizer updates views of the parameters.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        if device.type == "cpu":
            for owner, name, replacement in _replacements():
                stack.enter_context(patch.object(owner, name, replacement))
            stack.enter_context(_CudaMeansCpu())
        if double:
            from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

            wide = staticmethod(lambda logits: (logits, logits.max(dim=-1)[0]))  # the same without a cast to fp32
            stack.enter_context(patch.object(VocabParallelCrossEntropy, "calculate_logits_max", wide))
            stack.enter_context(_SoftmaxKeepsDouble())
        yield
