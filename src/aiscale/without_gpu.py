"""What DeepSpeed and Megatron-Core lack on a machine without a GPU. With a GPU nobody needs it.

if not torch.cuda.is_available():
    from aiscale import without_gpu
    without_gpu.prepare_deepspeed()  # or prepare_megatron(), before you import the library
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from queue import SimpleQueue
from types import ModuleType
from unittest.mock import MagicMock, patch

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_until_the_end = ExitStack()


def prepare_deepspeed() -> None:
    """Its accelerator is the CPU.

    It does not compile an all-reduce through shared memory: a minute, and a compiler.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    # Else it loads torch's compiler, a fifth of its start.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    import deepspeed

    # Through vars(): reading this attribute makes DeepSpeed probe the compiler for all operations.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


def prepare_megatron() -> None:
    """Wherever it asks for CUDA, until this process ends, it gets the CPU.

    It also loads the states of torch's Adam.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # as above
    # It forks the processes that write a checkpoint: OpenMP's threads would not be there.
    torch.set_num_threads(1)
    leave_out_triton()
    logging.getLogger("megatron").setLevel(logging.ERROR)  # its warnings are for its authors
    _until_the_end.enter_context(megatron_on(_CPU))
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    write = DistributedOptimizer._set_main_param_and_optimizer_states

    def write_with_step(self, parameter, tensors) -> None:
        """A checkpoint has one step count; torch's Adam, unlike Apex's, has one per parameter."""
        group, at = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][at]]
        # They would share one, and count it up once for each parameter.
        state["step"] = state["step"].clone()
        write(self, parameter, {**tensors, "step": state["step"]})

    DistributedOptimizer._set_main_param_and_optimizer_states = write_with_step


def leave_out_triton() -> None:
    """An empty module in the place of GPU kernels that need Triton, where there is no Triton.

    Megatron-Core imports these kernels of its experts, and with them Triton (a gigabyte), even if
    no model has any experts. Call this before the first import of Megatron-Core.

    A module named `triton` would not do: torch's compiler would find it, and take it for the real
    one.
    """
    if importlib.util.find_spec("triton") is None:
        kernels = ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        kernels.__getattr__ = lambda name: None  # whatever is imported from it
        sys.modules[kernels.__name__] = kernels


@contextmanager
def megatron_on(device: torch.device, *, double: bool = False) -> Iterator[None]:
    """Make Megatron-Core run on `device` until the context ends.

    On a CPU, the few places where it assumes CUDA are redirected. With `double` it runs in fp64, on
    any device: else its cross-entropy and its softmax cast to fp32.
    """
    with ExitStack() as stack, warnings.catch_warnings():
        # Hide what only Megatron-Core's authors can act on: advice on fused kernels and CUDA
        # settings, deprecations.
        warnings.filterwarnings("ignore", module="megatron")
        warnings.filterwarnings(
            "ignore", ".*torch.distributed.*deprecated|Please use DTensor", FutureWarning
        )
        warnings.filterwarnings(
            "ignore", "torch.distributed is disabled|The argument order of load", UserWarning
        )
        # Without masters, the distributed optimizer updates views of the parameters.
        warnings.filterwarnings(
            "ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning
        )
        if device.type == "cpu":
            for owner, name, replacement in _replacements():
                stack.enter_context(patch.object(owner, name, replacement))
            stack.enter_context(_CudaMeansCpu())
        if double:
            from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

            # The same without a cast to fp32.
            wide = staticmethod(lambda logits: (logits, logits.max(dim=-1)[0]))
            stack.enter_context(
                patch.object(VocabParallelCrossEntropy, "calculate_logits_max", wide)
            )
            stack.enter_context(_SoftmaxKeepsDouble())
        yield


def _replacements() -> list[tuple[object, str, object]]:
    """(object, attribute, replacement on the CPU)."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    return [
        (torch.cuda, "current_device", lambda: _CPU),
        # Reductions of gradients and experts ask for streams. On a CPU nothing runs beside.
        (torch.cuda, "current_stream", MagicMock()),
        (torch.cuda, "stream", lambda *_: nullcontext()),
        (torch.cuda, "Stream", MagicMock()),
        (torch.cuda, "synchronize", lambda *_, **__: None),
        (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        (torch.cuda, "manual_seed", torch.manual_seed),
        # Where a rank hands itself what it wrote. Else each starts a process for it, with all
        # imports: five seconds.
        (filesystem_async, "_results_queue", SimpleQueue()),
        # It copies counts of rows on a stream of their own.
        (token_dispatcher, "maybe_move_tensor_to_cpu", _on_the_cpu),
        (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
    ]


def _on_the_cpu(tensor, as_numpy: bool = False, **_: object):
    return tensor.numpy() if as_numpy and tensor is not None else tensor


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
