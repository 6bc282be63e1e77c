"""PowerSGD with torch's own hook: a gradient matrix is sent as two low-rank factors.

    aiscale train --recipe laptop --nproc 4 --set parallel.strategy=ddp --set compression.method=powersgd

Vogels et al. 2019. A matrix M (n, m) is sent as factors P (n, r) and Q (m, r), M ~ P Q^T, if that is less than half of
it: (n + m) r x 2 < n m. All other tensors are sent whole. The error of the factors is added to the next gradient.

torch's `powerSGD_hook` does the work. We fix three things from outside:

    one bucket   Its callbacks wait for further all-reduces on gloo's two threads, so that two buckets deadlock: on
                 gloo, one DDP bucket holds the whole model.
    identity     It keys errors and factors by bucket number, but DDP rebuilds its buckets after the first backward
                 pass, also of a resumed run: here they belong to parameters.
    a start      Every Q is drawn from (seed, parameter), so that a resumed run equals one that never stopped.

The first two steps are always dense: torch needs DDP's final buckets first.

Shapes: n rows, m columns of a matrix, r = min(n, m, compression.rank).
"""

# No `from __future__ import annotations` here: DDP checks its hook's annotations, which must be types, not strings.

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from aiscale.config import ConfigError, ParallelConfig, Run
from aiscale.cost.compression import FIRST_POWERSGD_STEP, powersgd_rank
from aiscale.distributed import World
from aiscale.parallel.compress.base import Compressor

_MIB = 2**20
_EPSILON = 1e-8  # for a gradient of zeros, whose factors would be 0 / 0


class PowerSGD(Compressor):
    """torch's PowerSGD, with errors and factors stored by parameter."""

    def __init__(self, run: Run, world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(run, world, model, optimizer)
        config = run.compression
        if config.wire != "same":
            raise ConfigError(
                f"compression.wire {config.wire} with compression.method powersgd: torch's hook sends its factors "
                "in the gradients' own precision: set wire=same"
            )
        if world.device.type == "cpu" and torch.cuda.is_available():
            raise ConfigError(
                "compression.method powersgd with loop.device=cpu where torch sees a GPU: torch's hook waits for the "
                "GPU after every bucket: set CUDA_VISIBLE_DEVICES= to hide it"
            )
        self.powersgd = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=config.rank,
            start_powerSGD_iter=max(FIRST_POWERSGD_STEP, config.warmup_steps),
            orthogonalization_epsilon=_EPSILON,
        )
        self.shapes = {name: tuple(parameter.shape) for parameter, name in self.names.items()}
        #: flat, by parameter; views of the hook's tensors once it has run
        self.errors = {name: torch.zeros_like(p, requires_grad=False).view(-1) for p, name in self.names.items()}
        self.factors = {
            name: self._first_factor(place, parameter)
            for place, (parameter, name) in enumerate(self.names.items())
            if powersgd_rank(parameter.shape, config.rank)
        }
        self.layouts: dict[int, list[str]] = {}  #: bucket -> its parameters, in the order of torch's memory

    def _first_factor(self, place: int, parameter: nn.Parameter) -> Tensor:
        """Q of the first compressed step, (m r,), the same on all ranks."""
        generator = torch.Generator().manual_seed(self.run.loop.seed * 100_003 + place)
        size = parameter[0].numel() * powersgd_rank(parameter.shape, self.config.rank)
        return torch.randn(size, generator=generator, dtype=parameter.dtype).to(parameter.device)

    @property
    def bucket_mb(self) -> float:
        """MiB of DDP's buckets; one bucket for all on gloo."""
        asked, default = self.run.parallel.bucket_mb, ParallelConfig.__dataclass_fields__["bucket_mb"].default
        needed = sum(parameter.nbytes for parameter in self.names) / _MIB + 1
        if asked >= needed or self.world.backend != "gloo":
            return asked
        if asked != default:
            raise ConfigError(
                f"parallel.bucket_mb {asked:g} with compression.method powersgd on gloo: gradients of {needed - 1:.3g} "
                "MiB would fill several buckets, and torch's hook then waits for ever on gloo's two threads: leave "
                "bucket_mb out, and there will be one bucket"
            )
        return needed

    def hook(self, bucket: dist.GradBucket) -> Future[Tensor]:
        if self.world.backend == "gloo" and not (bucket.index() == 0 and bucket.is_last()):
            raise ConfigError(
                "compression.method powersgd on gloo needs all gradients in one bucket, but DDP made several, as it "
                "does for parameters of several types: use one type, or another method"
            )
        self.check_finite(bucket.parameters(), bucket.gradients())
        names = [self.names[parameter] for parameter in bucket.parameters()]
        if self.layouts.get(bucket.index()) != names:
            self._lay_out(bucket.index(), names)
        return powerSGD_hook(self.powersgd, bucket)

    def after_backward(self) -> None:
        for index, names in self.layouts.items():
            self._find_pieces(index, names)
        super().after_backward()

    def _lay_out(self, index: int, names: list[str]) -> None:
        """Set torch's memory for a bucket that holds these parameters."""
        factored = self._factored(names)
        like = self.errors[names[0]]
        rows = sum(self.shapes[name][0] * powersgd_rank(self.shapes[name], self.config.rank) for name in factored)
        factors = [self.factors[name] for name in factored]
        self.powersgd.error_dict[index] = torch.cat([self.errors[name] for name in names])
        self.powersgd.p_memory_dict[index] = like.new_empty(rows)
        self.powersgd.q_memory_dict[index] = torch.cat(factors) if factors else like.new_empty(0)
        self.layouts[index] = names

    def _find_pieces(self, index: int, names: list[str]) -> None:
        """Make errors and factors views of torch's memory of a bucket."""
        for pieces, memory, order in (
            (self.errors, self.powersgd.error_dict[index], names),
            (self.factors, self.powersgd.q_memory_dict[index], self._factored(names)),
        ):
            sizes = [pieces[name].numel() for name in order]
            pieces.update(zip(order, memory.split(sizes), strict=True))

    def _factored(self, names: list[str]) -> list[str]:
        """The parameters sent as factors, in the order of torch's memory: grouped by shape."""
        by_shape: dict[tuple[int, ...], list[str]] = {}
        for name in names:
            if name in self.factors:
                shape = self.shapes[name]
                by_shape.setdefault((shape[0], self.errors[name].numel() // shape[0]), []).append(name)
        return [name for group in by_shape.values() for name in group]

    def tensors(self) -> dict[str, list[Tensor]]:
        p = list(self.powersgd.p_memory_dict.values())
        return {"compression": [*self.errors.values(), *self.factors.values(), *p]}

    def state(self) -> dict:
        rank = self.world.rank
        errors = {f"rank{rank}.{name}": error for name, error in self.errors.items()}
        return {**super().state(), "errors": errors, "factors": dict(self.factors)}

    def load(self, state: dict) -> None:
        super().load(state)
        self.errors = {name: state["errors"][f"rank{self.world.rank}.{name}"].clone() for name in self.errors}
        self.factors = {name: state["factors"][name].clone() for name in self.factors}
        self.powersgd.iter = self.step
        self.layouts = {}  # torch's memory is rebuilt from the pieces
