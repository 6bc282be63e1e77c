"""What DeepSpeed and Megatron-Core lack on a machine without a GPU. With a GPU nobody needs it.

if not torch.cuda.is_available():
    from aiscale import without_gpu
    without_gpu.prepare_deepspeed()  # or prepare_megatron(), before you import the library
"""

import os
from contextlib import ExitStack

import torch

_until_the_end = ExitStack()


def prepare_deepspeed() -> None:
    """Its accelerator is the CPU; it does not compile an all-reduce through shared memory: a minute, and a compiler."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # else it loads torch's compiler, a fifth of its start
    import deepspeed

    # Through vars(): reading this attribute makes DeepSpeed probe the compiler for every operation it has.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


def prepare_megatron() -> None:
    """Wherever it asks for CUDA, until this process ends, it gets the CPU. It also loads the states of torch's Adam."""
    from aiscale.parallel.megatron.adapt import adapted

    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # as above
    torch.set_num_threads(1)  # it forks the processes that write a checkpoint: OpenMP's threads would not be there
    _until_the_end.enter_context(adapted(torch.device("cpu")))
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    write = DistributedOptimizer._set_main_param_and_optimizer_states

    def write_with_step(self, parameter, tensors) -> None:
        """A checkpoint has one step count for all parameters. torch's Adam, unlike Apex's, counts for each."""
        group, at = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][at]]
        state["step"] = state["step"].clone()  # they would share one, and count it up once for each parameter
        write(self, parameter, {**tensors, "step": state["step"]})

    DistributedOptimizer._set_main_param_and_optimizer_states = write_with_step
