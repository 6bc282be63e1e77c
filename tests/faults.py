"""Deliberate bugs that tests of `aiscale verify` plant: `python tests/faults.py -m aiscale train ...`.

Runs a module as `python -m` does; every job whose run is named NAME--FAULT trains with that fault. The package contains
none of this: each fault replaces a function that the job is about to call.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from types import SimpleNamespace

import torch

import aiscale.train
from aiscale.processes import start_method

FAULTS = {}


def fault(function):
    """Register a function that plants the fault of its name."""
    FAULTS[function.__name__.replace("_", "-")] = function
    return function


def replace(where: str, make) -> None:
    module, _, path = where.partition(":")
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    setattr(owner, name, make(getattr(owner, name)))


def after_drawing(weight_name: str, change) -> None:
    """Call change(weight) on this weight of every GPT after it is drawn."""

    def make(real):
        def changed(self, name, weight):
            real(self, name, weight)
            if name == weight_name:
                with torch.no_grad():
                    change(weight)

        return changed

    replace("aiscale.model:GPT._init", make)


@fault
def none():
    """No fault: the case must pass, or the other faults prove nothing."""


@fault
def all_reduce_skipped():
    replace("aiscale.parallel.ddp:DDPEngine._accumulating", lambda real: lambda self, is_last: self.module.no_sync())


@fault
def shards_not_reduced():
    """Every rank uses its shard of its own gradient."""

    def keep(self, output_tensor, input_tensor, group, op, async_op=False):
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])

    collectives = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
    replace(f"{collectives}:DefaultReduceScatter.__call__", lambda real: keep)


@fault
def gradient_times_the_world_size_in_fp32():
    """A sum instead of an average, in fp32, where torch lets the collective average."""

    def make(real):
        def times(self, output_tensor, input_tensor, group, *args, **kwargs):
            factor = group.size() if input_tensor.dtype == torch.float32 else 1
            return real(self, output_tensor, input_tensor.mul_(factor), group, *args, **kwargs)

        return times

    collectives = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
    replace(f"{collectives}:DefaultReduceScatter.__call__", make)


@fault
def rank_0_evaluates_alone():
    """Each rank reports the loss of its own share of an evaluation, with everybody's number of tokens."""

    def make(real):
        def alone(self, micro_batches):
            batches = list(micro_batches)
            world, self.world = self.world, SimpleNamespace(device=self.world.device, sum=lambda number: number)
            try:
                loss, tokens = real(self, batches)
            finally:
                self.world = world
            return loss, tokens * world.size

        return alone

    replace("aiscale.parallel.serial:Engine.evaluate", make)


@fault
def unsent_gradients_forgotten():
    replace("aiscale.parallel.radius.compressor:give_back", lambda real: lambda *args: None)

    def make(real):
        def after_backward(self):
            real(self)
            for unsent in self.unsent.values():
                unsent.zero_()

        return after_backward

    replace("aiscale.parallel.compress.topk:TopK.after_backward", make)


@fault
def gradient_doubled():
    def make(clip):
        def doubled(parameters, max_norm):
            parameters = list(parameters)
            for parameter in parameters:
                parameter.grad *= 2
            return clip(parameters, max_norm)

        return doubled

    replace("aiscale.parallel.serial:clip_", make)


@fault
def loss_divided_by_the_wrong_n():

    def make(real):
        def wrong(*tensors):
            n = tensors[-1].numel()
            return real(*tensors) * n / (n + 1)

        return wrong

    for module in ("aiscale.model.gpt", "aiscale.parallel.parts"):
        if module in sys.modules:
            replace(f"{module}:cross_entropy", make)


@fault
def qkv_swapped():
    def swap(weight):
        q, k, v = weight.chunk(3)
        weight.copy_(torch.cat([k, q, v]))

    after_drawing("blocks.0.attn.qkv.weight", swap)


@fault
def qkv_rows_in_the_wrong_order():
    """Weights are carried to Megatron-Core without reordering rows."""
    layout = "aiscale.parallel.megatron.layout"
    replace(
        f"{layout}:query_key_value_order",
        lambda real: lambda model: torch.arange((model.n_head + 2 * model.kv_heads) * model.d_head),
    )


@fault
def tensor_parallel_reduction_dropped():
    replace("megatron.core.tensor_parallel.mappings:_reduce", lambda real: lambda tensor, group: tensor)


@fault
def tied_embedding_gradient_not_reduced():
    if "megatron.core" in sys.modules:
        finalize = "megatron.core.distributed.finalize_model_grads"
        replace(f"{finalize}:_allreduce_word_embedding_grads", lambda real: lambda *args: None)
    else:

        def forget(self):
            self.embedding_group = None

        replace("aiscale.parallel.pipeline:PipelineEngine._meet_for_tied_embeddings", lambda real: forget)


@fault
def decay_applied_to_biases():
    replace(
        "aiscale.optim:parameter_groups",
        lambda real: lambda model, weight_decay: [{"params": list(model.parameters()), "weight_decay": weight_decay}],
    )


@fault
def learning_rate_off_by_one_step():
    replace("aiscale.train.loop:lr_at", lambda real: lambda step, *rest: real(step + 1, *rest))


@fault
def a_micro_batch_dropped():
    replace("aiscale.data:Batches.share", lambda real: lambda self, *args: real(self, *args)[:-1])


@fault
def one_wrong_weight():
    def change(weight):
        weight[3, 5] += 1e-3

    after_drawing("blocks.0.mlp.up.weight", change)


#: strategy -> (its library, the function that enters it)
LIBRARIES = {
    "ddp": ("torch", "torch.nn.parallel:DistributedDataParallel.__init__"),
    "fsdp": ("torch", "aiscale.parallel.fsdp:fully_shard"),
    "pipeline": ("torch", "torch.distributed.pipelining:PipelineStage.__init__"),
    "zero": ("deepspeed", "deepspeed:initialize"),
    "megatron": ("megatron", "megatron.core.models.gpt.gpt_model:GPTModel.__init__"),
}


def make_raise(strategy: str) -> None:
    def raising(*_, **__):
        raise RuntimeError(f"the library of {strategy} was entered")

    library, where = LIBRARIES[strategy]
    if library in sys.modules:
        replace(where, lambda real: raising)
    else:
        sys.modules[library] = None  # makes the import raise


@fault
def own_library_raises(strategy):
    make_raise(strategy)


@fault
def other_libraries_raise(strategy):
    for other in LIBRARIES:
        if other != strategy:
            make_raise(other)


def train_with_faults() -> None:
    """Make `fit` plant the fault in the run's name."""
    real = aiscale.train.fit

    def fit(run, *args, **kwargs):
        name = run.name.partition("--")[2]
        if name:
            wants_strategy = FAULTS[name].__code__.co_argcount
            FAULTS[name](*[run.parallel.strategy] * wants_strategy)
        return real(run, *args, **kwargs)

    aiscale.train.fit = fit
    if start_method(["torch"]) == "spawn":  # ranks that cannot be forked get the faults, too
        again = lambda argv: argv if argv[0] == "-c" else [__file__, *argv]  # noqa: E731
        replace("aiscale.launch:start_python", lambda real: lambda argv, *a, **k: real(again(argv), *a, **k))


if __name__ == "__main__":
    train_with_faults()
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
