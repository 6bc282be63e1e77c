"""The optimizer and its learning rate, the same for every strategy.

torch's own are SGD, Adam, AdamW and Adafactor. LARS, LAMB and Muon are here (`ByTensor`): torch has
no LARS and LAMB, and its Muon takes matrices only and no shards of them. All optimizers share one
learning rate and one schedule.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from aiscale.errors import ConfigError
from aiscale.plan.config import OptimizerConfig
from aiscale.plan.config.choices import is_orthogonalized

# Devices with torch's fused optimizer kernels; on a CPU they are 8 times as fast as one update per
# parameter.
FUSED_DEVICES = {"cpu", "cuda", "mps", "xpu"}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Weight decay on matrices and embeddings; none on biases and norms."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of `config` over the model's trainable parameters; its sources are below."""
    groups = parameter_groups(model, config.weight_decay)
    if not groups:
        raise ConfigError(
            "the model has no trainable parameters: call requires_grad_(True) on some of them"
        )
    fused = all(
        p.device.type in FUSED_DEVICES and p.is_floating_point()
        for group in groups
        for p in group["params"]
    )
    if config.name == "sgd":
        # torch's fused SGD does not support FSDP's sharded tensors.
        fused = fused and all(type(p) is nn.Parameter for group in groups for p in group["params"])
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused)
    if config.name == "adafactor":
        # beta2, clipping and smallest step are Shazeer and Stern's (2018).
        return torch.optim.Adafactor(groups, lr=config.lr)
    betas = (config.beta1, config.beta2)
    if config.name in ("lars", "lamb", "muon"):
        options = {
            "betas": betas,
            "eps": config.eps,
            "momentum": config.momentum,
            "trust": config.trust,
        }
        return ByTensor(_by_rule(model, groups, config.name), lr=config.lr, **options)
    kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    return kind(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused)


class ByTensor(torch.optim.Optimizer):
    """Optimizers whose step depends on a whole tensor at once.

    A rule takes this rank's weights, gradient and states, and under FSDP only its rows of them;
    `like`, the parameter itself, then says how to add up or gather the shards.
    """

    def __init__(self, groups: list[dict], **options) -> None:
        super().__init__(groups, options)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    _RULES[group["rule"]](_local(p), _local(p.grad), self.state[p], group, p)


def _by_rule(model: nn.Module, groups: list[dict], name: str) -> list[dict]:
    """The groups with their rules; Muon's: matrices, other matrices (embeddings, head), vectors."""
    if name != "muon":
        return [{**group, "rule": name} for group in groups]
    matrices = {p for n, p in model.named_parameters() if is_orthogonalized(n, p.dim())}
    parts = [
        (group, [p for p in group["params"] if (p in matrices) == by])
        for group in groups
        for by in (True, False)
    ]
    return [
        {**group, "params": params, "rule": "muon" if params[0] in matrices else "adamw"}
        for group, params in parts
        if params
    ]


def _lars(w: Tensor, g: Tensor, state: dict, group: dict, like: Tensor) -> None:
    """v = m v + lr trust |w| / (|g| + decay |w|) (g + decay w); w = w - v.

    You et al. 2017, algorithm 1. Vectors, which their own size would keep near 0, take plain steps.
    """
    decay, ratio = group["weight_decay"], 1.0
    if like.dim() > 1:
        size = _norm(w, like)
        ratio = _ratio(group["trust"] * size, _norm(g, like) + decay * size)
    v = _local(_kept(state, "momentum_buffer", like))
    v.mul_(group["momentum"]).add_((g + decay * w) * ratio * group["lr"])
    w.sub_(v)


def _lamb(w: Tensor, g: Tensor, state: dict, group: dict, like: Tensor) -> None:
    """w = w - lr |w| / |r + decay w| (r + decay w), with Adam's direction r.

    You et al. 2020, algorithm 2. AdamW is the same without the ratio.
    """
    update = _adam_direction(g, state, group, like).add_(w, alpha=group["weight_decay"])
    ratio = 1.0 if group["rule"] == "adamw" else _ratio(_norm(w, like), _norm(update, like))
    w.sub_(update * ratio * group["lr"])


def _muon(w: Tensor, g: Tensor, state: dict, group: dict, like: Tensor) -> None:
    """Steps along the orthogonal matrix nearest to the momentum (Jordan et al. 2024).

    They are as long as AdamW's usually are, 0.2 sqrt(larger side) (Liu et al. 2025), so that lr and
    decay fit both: torch.optim.Muon's match_rms_adamw.
    """
    m = _local(_kept(state, "momentum_buffer", like))
    m.lerp_(g, 1 - group["momentum"])
    update = g.lerp(m, group["momentum"])  # Nesterov's
    if isinstance(like, DTensor):
        whole = DTensor.from_local(
            update, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
        )
        whole = orthogonal(whole.full_tensor())
        update = _local(
            distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
        )
    else:
        update = orthogonal(update)
    w.mul_(1 - group["lr"] * group["weight_decay"])
    w.sub_(update, alpha=group["lr"] * 0.2 * max(like.shape) ** 0.5)


_RULES = {"lars": _lars, "lamb": _lamb, "muon": _muon, "adamw": _lamb}


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """Nearly U V^T of the singular value decomposition U S V^T.

    By Newton and Schulz's iteration in bf16 (fp64 stays), which brings singular values to 0.7 to
    1.2. A matrix of several heads is taken as one.
    """
    a, b, c = 3.4445, -4.775, 2.0315
    x = matrix if matrix.dtype == torch.float64 else matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrix.dtype)


def _adam_direction(g: Tensor, state: dict, group: dict, like: Tensor) -> Tensor:
    """m / (1 - beta1^t) over sqrt(v / (1 - beta2^t)) + eps."""
    (beta1, beta2), step = group["betas"], state.setdefault("step", torch.tensor(0.0))
    m, v = (_local(_kept(state, name, like)) for name in ("exp_avg", "exp_avg_sq"))
    step += 1
    t = step.item()
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    return (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt_() + group["eps"])


def _kept(state: dict, name: str, like: Tensor) -> Tensor:
    if name not in state:
        state[name] = torch.zeros_like(like)
    return state[name]


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """1 where either is 0: weights that start at 0 could not leave it."""
    return torch.where((above > 0) & (below > 0), above / below, 1.0)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _norm(local: Tensor, like: Tensor) -> Tensor:
    """The Euclidean norm of the whole tensor; if `like` is sharded, `local` is a shard of it."""
    square = local.square().sum()
    if isinstance(like, DTensor):
        parts = [Partial() if place.is_shard() else Replicate() for place in like.placements]
        square = DTensor.from_local(square, like.device_mesh, parts).full_tensor()
    return square.sqrt()


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients in place so that their global norm is at most max_norm; 0 only measures.
    Returns the norm before clipping, a scalar tensor; for sharded parameters, the whole model's."""
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    if isinstance(norm, torch.Tensor) and hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    if max_norm > 0:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
