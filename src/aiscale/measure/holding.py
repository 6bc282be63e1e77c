"""What a rank of a trainer holds, by category, found from outside.

Gradients are counted just before they are used: most trainers free them in the step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from aiscale.measure.meter import held_bytes

#: DeepSpeed's attributes: stages 1 and 2, then 3, then stage 0 in 16 bits.
_MASTERS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups")
_GRADIENTS = (
    "averaged_gradients",
    "all_grad_tensors",
    "grads_in_partition",
    "grad_partitions_flat_buffer",
)


def instances(name: str) -> list[Any]:
    """The objects of this process whose class has that name."""
    return [each for each in gc.get_objects() if type(each).__name__ == name]


def tensors(tree: object) -> list[Tensor]:
    """All tensors in nested lists and dictionaries; of a sharded one this rank's part."""
    if isinstance(tree, DTensor):
        return [tree.to_local()]
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    if not isinstance(tree, (list, tuple)):
        return []
    return [tensor for item in tree for tensor in tensors(item)]


class Holding:
    """Of one trainer's rank."""

    def __init__(self, trainer: str) -> None:
        self.trainer = trainer
        self.optimizer: Any = None
        self.gradient_bytes = 0

    def begin(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        if self.trainer == "zero":
            self._watch_deepspeed(*instances("DeepSpeedEngine"))
        elif self.trainer != "megatron":
            register_optimizer_step_pre_hook(lambda *_: self._note(self._own_gradients()))

    def bytes(self) -> dict[str, int]:
        """By category. A buffer that two tensors share counts once."""
        if self.trainer == "megatron":
            return held_bytes(self._of_megatron())
        if self.trainer == "zero":
            found = held_bytes(self._of_deepspeed(*instances("DeepSpeedEngine")))
        else:
            found = held_bytes(self._own())
        return {**found, "gradients": self.gradient_bytes}

    def _note(self, gradients: Iterable[Tensor]) -> None:
        self.gradient_bytes = held_bytes({"all": gradients})["all"]

    def _parameters(self) -> list[Tensor]:
        return [weight for group in self.optimizer.param_groups for weight in group["params"]]

    def _own_gradients(self) -> list[Tensor]:
        return tensors([weight.grad for weight in self._parameters()])

    def _own(self) -> dict[str, list[Tensor]]:
        held = {
            "parameters": tensors(self._parameters()),
            "optimizer states": tensors(list(self.optimizer.state.values())),
        }
        for radius in instances("Radius"):
            held["compression"] = tensors([radius.residual, radius.mask])
        return held

    def _of_megatron(self) -> dict[str, list[Tensor]]:
        buffers = instances("_ParamAndGradBuffer")
        weights = [weight for model in instances("HybridModel") for weight in model.parameters()]
        kept = [buffer.param_data for buffer in buffers if buffer.param_data is not None]
        inner = self.optimizer
        states = [
            state for each in inner.chained_optimizers for state in each.optimizer.state.values()
        ]
        return {
            "parameters": [*kept, *weights],
            "gradients": [buffer.grad_data for buffer in buffers],
            # fp32 masters count as optimizer states
            "optimizer states": [*tensors(states), *tensors(self._parameters())],
        }

    def _of_deepspeed(self, engine: Any) -> dict[str, list[Tensor]]:
        """fp32 masters count as optimizer states, as in the ZeRO paper."""
        weights = list(engine.module.parameters())
        shards = [weight.ds_tensor for weight in weights if hasattr(weight, "ds_tensor")]
        masters = [getattr(engine.optimizer, name, []) for name in _MASTERS]
        return {
            "parameters": [weight.data for weight in weights] + shards,
            "optimizer states": tensors([masters, list(self.optimizer.state.values())]),
        }

    def _watch_deepspeed(self, engine: Any) -> None:
        """DeepSpeed frees gradients in its step, in stage 1 while the last micro-batch is computed.

        So the most that there are after a micro-batch counts.
        """
        step, accumulated = engine.step, engine.gradient_accumulation_steps()

        def noted(*args, **kwargs):
            before = self.gradient_bytes if engine.micro_steps % accumulated else 0
            self._note(self._deepspeeds_gradients(engine))
            self.gradient_bytes = max(before, self.gradient_bytes)
            return step(*args, **kwargs)

        engine.step = noted

    def _deepspeeds_gradients(self, engine: Any) -> list[Tensor]:
        zero = engine.optimizer
        found = [weight.grad for weight in engine.module.parameters()]
        found += [getattr(zero, name, None) for name in _GRADIENTS]
        masters = tensors([getattr(zero, name, []) for name in _MASTERS])
        return tensors([*found, [master.grad for master in masters]])
