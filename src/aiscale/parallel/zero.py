"""ZeRO with DeepSpeed's own engine: data-parallel ranks shard the training states instead of each holding them all.

    engine = ZeROEngine(run.override("parallel.strategy=zero", "parallel.zero_stage=2"), world)
    print(json.dumps(deepspeed_config(run, world.size), indent=2))      # also written to runs/NAME/ds_config.json

Checkpoints are in DeepSpeed's format: they resume only at the same world size and stage; `weights` reads them at any.
Rajbhandari et al. 2020.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from aiscale import cost
from aiscale.checkpoint import CheckpointError, flush
from aiscale.config import Run
from aiscale.distributed import World
from aiscale.meter import held_bytes
from aiscale.model.build import count_parameters
from aiscale.optim import clip_, set_lr
from aiscale.parallel.deepspeed_library import calling, forget_groups, import_deepspeed, quiet
from aiscale.parallel.serial import Engine, MicroBatch, move

_TAG = "deepspeed"  #: DeepSpeed's folder inside a checkpoint
_LARGEST_BUCKET = 500_000_000  #: elements; DeepSpeed's default, which it allocates even for a tiny model


def deepspeed_config(run: Run, world_size: int) -> dict:
    """The content of ds_config.json for `run` on `world_size` ranks. DeepSpeed's default sizes are meant for billions
    of parameters; here they are set to this model's size."""
    layout, loop = run.parallel, run.loop
    n_micro, micro_batch = loop.micro_batches(layout.data_parallel(world_size))
    # The largest block or tensor, rounded up to even: DeepSpeed aligns 16-bit messages to 4 bytes.
    largest = max(sum(cost.layer_parameters(run.model).values()), run.model.vocab_size * run.model.d_model)
    bucket = min(_LARGEST_BUCKET, 2 * math.ceil(largest / 2))
    zero = {
        "stage": layout.zero_stage,
        "reduce_bucket_size": bucket,  # elements per all-reduce; at stage 2 the most that is unsharded at a time
        "allgather_bucket_size": bucket,
    }
    if layout.zero_stage == 3:
        zero |= {
            "sub_group_size": min(count_parameters(run.model), 1_000_000_000),  # elements updated at once
            "stage3_param_persistence_threshold": 0,  # shard the small tensors too
            # Free each layer's weights after the forward pass and gather them again for the backward pass, without
            # prefetch. By default DeepSpeed keeps up to 1e9 parameters, so a small model would never be sharded.
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        }
    config = {
        "train_batch_size": loop.global_batch,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": n_micro,
        "gradient_clipping": run.optimizer.clip_norm,
        "steps_per_print": 10**9,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # torch's AdamW, as in every other strategy
    }
    if loop.precision in ("bf16", "fp16"):
        config[loop.precision] = {"enabled": True}
    return config


class ZeROEngine(Engine):
    """One data-parallel rank, which holds its shard of the training states."""

    checkpoint_format = "deepspeed"

    def __init__(self, run: Run, world: World) -> None:
        deepspeed = import_deepspeed(world.device)
        super().__init__(run, world)
        self.autocast_dtype = None  # DeepSpeed casts the model itself
        self.config = deepspeed_config(run, world.size)
        self._freed_bytes = 0  # of the gradients that the last update freed
        with world.control(), calling(world):
            self.engine, *_ = deepspeed.initialize(model=self.model, optimizer=self.optimizer, config=self.config)
        self._forget_warm_up()
        # DeepSpeed frees gradients in its step, so their bytes are noted just before it reduces them.
        self._reduce, self.engine.allreduce_gradients = self.engine.allreduce_gradients, self._note_and_reduce

    def _place(self, model: nn.Module) -> nn.Module:
        if self.run.parallel.zero_stage == 3:
            # One device may not hold it all: DeepSpeed shards it on the host.
            return move(model, torch.device("cpu"))
        return super()._place(model)

    @property
    def _zero(self):
        """DeepSpeed's wrapper around our optimizer; at stage 0 in fp32 our optimizer itself."""
        return self.engine.optimizer

    def _forget_warm_up(self) -> None:
        """Undo DeepSpeed's warm-up: in 16 bits, stage 0 takes one optimizer step with zero gradients to allocate the
        moments. That step decays the weights and shifts the bias correction of all later steps by one."""
        if hasattr(self._zero, "fp32_groups"):
            for masters, group in zip(self._zero.fp32_groups, self._zero.fp16_groups, strict=True):
                for master, parameter in zip(masters, group, strict=True):
                    master.data.copy_(parameter.data)
            for state in self.optimizer.state.values():
                for value in state.values():
                    value.zero_()

    def accumulate(self, micro_batches: list[MicroBatch]) -> float:
        with calling(self.world):
            loss = super().accumulate(micro_batches)
        if self.run.parallel.zero_stage >= 2:
            self._freed_bytes = _nbytes(self._gradients())
        return loss

    def _clear_gradients(self) -> None:
        """DeepSpeed has done it."""

    @contextmanager
    def _accumulating(self, is_last: bool) -> Iterator[None]:
        # Set explicitly, so the number of micro-batches in a step may differ from the configuration.
        self.engine.set_gradient_accumulation_boundary(is_last)
        yield
        if not is_last:
            self.engine.step()  # only counts the micro-batch

    def _backward(self, loss: Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)

    def _note_and_reduce(self, *args, **kwargs) -> None:
        if self.run.parallel.zero_stage < 2:  # gradients are still unsharded here
            self._freed_bytes = _nbytes(self._gradients())
        self._reduce(*args, **kwargs)

    def update(self, lr: float) -> tuple[float, bool]:
        set_lr(self.optimizer, lr)
        unwrapped = self._zero is self.optimizer  # DeepSpeed clips but does not report the norm
        norm = clip_(self.model.parameters(), 0).item() if unwrapped else 0.0
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
        with calling(self.world):
            self.engine.step()
        if not unwrapped:
            norm = float(self.engine.get_global_grad_norm())
        return norm, not math.isfinite(norm) or not self.engine.was_step_applied()

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.engine(tokens, targets)

    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> tuple[float, int]:
        with calling(self.world), self.world.control():  # stage 3 gathers the weights here too
            return super().evaluate(micro_batches)

    def tensors(self) -> dict[str, list[Tensor]]:
        """This rank's tensors by category. fp32 masters count as optimizer states, as in the ZeRO paper. DeepSpeed
        frees the gradients in the update. After that, one meta tensor of the same size stands for them."""
        zero, parameters = self._zero, list(self.model.parameters())
        gradients = self._gradients()
        if (freed := self._freed_bytes - _nbytes(gradients)) > 0:
            gradients.append(torch.empty(freed, dtype=torch.uint8, device="meta"))
        masters = [getattr(zero, name, []) for name in _MASTERS]
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return {
            "parameters": [p.data for p in parameters] + [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")],
            "gradients": gradients,
            "optimizer states": _tensors([masters, moments]),
            "buffers": list(self.model.buffers())
            + _tensors([bucket.buffer for bucket in getattr(zero, "ipg_buckets", {}).values()]),
        }

    def _gradients(self) -> list[Tensor]:
        zero = self._zero
        gradients = [p.grad for p in self.model.parameters()]
        gradients += [getattr(zero, name, None) for name in _GRADIENTS]
        gradients += [master.grad for master in _tensors([getattr(zero, name, []) for name in _MASTERS])]
        return _tensors(gradients)

    def state(self, full: bool = False) -> dict:
        """The whole model under GPT's names, on the CPU of every rank, from the fp32 masters; at stage 0 from the
        weights. Collective; `write` saves this rank's shards."""
        from deepspeed.utils import safe_get_full_fp32_param as gather

        state: dict[str, Tensor] = {}
        gathered: dict[Tensor, Tensor] = {}  # a tied parameter has two names
        with self.world.control(), torch.no_grad(), calling(self.world):
            for name, parameter in self.model.named_parameters(remove_duplicate=False):
                if parameter not in gathered:
                    whole = gather(parameter)
                    whole = parameter if whole is None else whole
                    gathered[parameter] = whole.detach().to("cpu", torch.float32, copy=True)
                state[name] = gathered[parameter]
        return state | {name: buffer.cpu() for name, buffer in self.model.named_buffers()}

    def write(self, folder: Path) -> None:
        """DeepSpeed's save_checkpoint into `folder`. Collective."""
        with calling(self.world):
            self.engine.save_checkpoint(str(folder), tag=_TAG)
        for file in filter(Path.is_file, folder.rglob("*")):
            flush(file)

    def read(self, folder: Path, note: dict) -> None:
        """DeepSpeed's load_checkpoint from `folder`. Collective. Raises CheckpointError for another world size or
        stage."""
        layout, stage = note["layout"], self.run.parallel.zero_stage
        if (note["world_size"], layout["zero_stage"]) != (self.world.size, stage):
            raise CheckpointError(
                f"{folder} was written by {note['world_size']} ranks at ZeRO stage {layout['zero_stage']}, but this "
                f"job has {self.world.size} at stage {stage}, and DeepSpeed resumes only the same: start "
                f"{note['world_size']} with parallel.zero_stage={layout['zero_stage']}"
            )
        with calling(self.world):
            self.engine.load_checkpoint(str(folder), tag=_TAG)

    def files(self) -> dict[str, str]:
        """DeepSpeed's configuration, for `deepspeed --deepspeed_config FILE` and other programs."""
        return {"ds_config.json": json.dumps(self.config, indent=2) + "\n"}

    def close(self) -> None:
        """Free what DeepSpeed holds, its process groups included. The world stays connected."""
        self.engine.destroy()
        del self.engine, self._reduce
        forget_groups()


def weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint under GPT's names, in fp32 (at stage 0 from 16 bits); needs no process group."""
    import_deepspeed(torch.device("cpu"))
    from deepspeed.utils import zero_to_fp32

    folder = Path(folder)
    if list((folder / _TAG).glob("*_optim_states.pt")):
        zero_to_fp32.tqdm = lambda items, **_: items  # no progress bars on stderr
        with quiet():
            return zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=_TAG)
    # Stage 0 writes one file, which zero_to_fp32 cannot read.
    states = torch.load(folder / _TAG / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=False)
    return {name: tensor.float() for name, tensor in states["module"].items()}


def preload() -> None:
    """Import DeepSpeed, only where ranks will run on the CPU."""
    if not torch.cuda.is_available():
        import_deepspeed(torch.device("cpu"))


# DeepSpeed's attributes, stages 1 and 2, then 3, then stage 0 in 16 bits
_MASTERS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups")
_GRADIENTS = ("averaged_gradients", "all_grad_tensors", "grads_in_partition", "grad_partitions_flat_buffer")


def _tensors(tree: object) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [tensor for item in tree for tensor in _tensors(item)] if isinstance(tree, list | tuple) else []


def _nbytes(tensors: list[Tensor]) -> int:
    return held_bytes({"all": tensors})["all"]
