"""All layouts of a model on so many devices, ranked, each loser with its reason; and what would make a model fit.

    found = search(shape, platform, gpus=512, global_batch=2048)
    found.best.layout.name(), found.ranked[1:5], found.reasons()
    found.advice()          # where nothing fits: by how much, and what would help

Tried: tp up to a node, every pp that layers allow, ZeRO-1 and FSDP, no and full recomputation, micro-batches of 1 to
16, interleaving, cp for long sequences, ep for experts. Memory is asked first, so most layouts cost microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from aiscale.config import ConfigError
from aiscale.plan.answer import Answer, predict
from aiscale.plan.constants import CONSTANTS
from aiscale.plan.hardware import Platform
from aiscale.plan.layout import Layout, Shape, Software
from aiscale.plan.memory import capacity_bytes, fits, needed_bytes

#: A framework that trains at scale today: fused optimizer and gradients, overlap, no launches peer by peer.
TUNED = Software(
    peer_launches=False, fused_optimizer=True, fused_gradients=True, gather_overlap=True, tp_overlap="backward"
)
LONG = 16_384  #: tokens of a sequence from which context parallelism is tried


@dataclass
class Found:
    """The result of a search."""

    shape: Shape
    platform: Platform
    gpus: int
    global_batch: int
    tried: int = 0
    ranked: list[Answer] = field(default_factory=list)  #: fitting, fastest first
    too_large: list[tuple[float, Layout]] = field(default_factory=list)  #: (GB over capacity, layout), least first

    @property
    def best(self) -> Answer:
        if not self.ranked:
            raise ConfigError(self.advice())
        return self.ranked[0]

    def reasons(self, most: int = 8) -> list[tuple[Answer, str]]:
        """The next best layouts, each with what makes it slower than the best."""
        return [(answer, reason(answer, self.best)) for answer in self.ranked[1 : most + 1]]

    def advice(self) -> str:
        """One line: by how much the smallest layout exceeds a device, and what would make it fit."""
        if not self.tried:
            return (
                f"no layout puts {self.global_batch} sequences on {self.gpus} devices: dp x micro_batch must divide "
                "global_batch: raise the batch, or take fewer nodes"
            )
        over, layout = self.too_large[0]
        need = f"the smallest layout ({layout.name()}) needs {over:.0f} GB a device more than there is"
        ways = []
        for times in (2, 4, 8, 16, 32, 64, 128):
            batch = max(self.global_batch, self.gpus * times // 8)
            if _fits_somehow(self.shape, self.platform, self.gpus * times, batch):
                nodes = -(-self.gpus * times // self.platform.gpus_per_node)
                ways.append(f"{nodes} nodes" + (f" with {batch} sequences a step" if batch > self.global_batch else ""))
                break
        lighter = replace(layout, offload=True, zero_stage=max(1, layout.zero_stage))
        if fits(self.shape, lighter, self.platform, CONSTANTS):
            ways.append("optimizer states in the host's memory (offload)")
        if self.shape.seq > 4096:
            ways.append(f"sequences shorter than {self.shape.seq}")
        return f"{need}; it would fit with {' or '.join(ways) if ways else 'a smaller model'}"


def search(shape: Shape, platform: Platform, gpus: int, global_batch: int, precision: str = "bf16") -> Found:
    found = Found(shape, platform, gpus, global_batch)
    for layout in candidates(shape, platform, gpus, global_batch, precision):
        found.tried += 1
        needed = needed_bytes(shape, layout, CONSTANTS)
        holds = capacity_bytes(platform, layout, CONSTANTS)
        if needed > holds:
            found.too_large.append(((needed - holds) / 1e9, layout))
        else:
            found.ranked.append(predict(shape, layout, platform))
    found.ranked.sort(key=lambda answer: answer.step.total_s)
    found.too_large.sort(key=lambda pair: pair[0])
    return found


def candidates(
    shape: Shape, platform: Platform, gpus: int, global_batch: int, precision: str = "bf16"
) -> Iterator[Layout]:
    """The layouts that are worth a look; each passes Layout.check."""
    for tp, pp, cp, dp in _meshes(shape, platform, gpus):
        if global_batch % dp:
            continue
        per_rank = global_batch // dp
        for micro in (1, 2, 4, 8, 16):
            if per_rank % micro:
                continue
            m = per_rank // micro
            for recompute in ("none", "full"):
                base = Layout(
                    dp=dp, tp=tp, pp=pp, cp=cp, micro_batch=micro, global_batch=global_batch, recompute=recompute,
                    zero_stage=1 if dp * cp > 1 else 0, sequence_parallel=tp > 1, precision=precision,
                    ep=_experts(shape, dp), software=TUNED,
                )  # fmt: skip
                if m >= pp:
                    yield base
                    v = _pieces(shape, pp)
                    if v > 1 and m % pp == 0:
                        yield replace(base, virtual_stages=v, schedule="interleaved")
                if pp == 1 and dp > 1 and not shape.experts:
                    yield replace(base, fsdp=True, zero_stage=0)


def _meshes(shape: Shape, platform: Platform, gpus: int) -> Iterator[tuple[int, int, int, int]]:
    for tp in (1, 2, 4, 8, 16):
        if tp > platform.gpus_per_node or shape.heads % tp or shape.width % tp or gpus % tp:
            continue
        for cp in (1, 2, 4, 8) if shape.seq >= LONG else (1,):
            for pp in range(1, min(shape.layers, gpus // tp) + 1):
                if gpus % (tp * pp * cp) == 0 and (shape.layers % pp == 0 or shape.layers / pp >= 4):
                    yield tp, pp, cp, gpus // (tp * pp * cp)


def _pieces(shape: Shape, pp: int) -> int:
    """Virtual stages of at least two layers, four pieces at most."""
    if pp < 3 or shape.layers % pp:
        return 1
    per = shape.layers // pp
    return max((v for v in (1, 2, 3, 4) if per % v == 0 and per // v >= 2), default=1)


def _experts(shape: Shape, dp: int) -> int:
    return max((n for n in range(1, shape.experts + 1) if shape.experts % n == 0 and dp % n == 0), default=1)


def _fits_somehow(shape: Shape, platform: Platform, gpus: int, global_batch: int) -> bool:
    return any(
        fits(shape, layout, platform, CONSTANTS)
        for layout in candidates(shape, platform, gpus, global_batch)
        if layout.recompute == "full" and layout.micro_batch == 1
    )


def reason(answer: Answer, best: Answer) -> str:
    """What costs this layout most beside the best: the part that grew most."""
    mine, others = _parts(answer), _parts(best)
    grown = {name: mine[name] - others[name] for name in mine}
    name = max(grown, key=grown.__getitem__)
    slower = 100 * (answer.step.total_s / best.step.total_s - 1)
    return f"{slower:.0f} % slower: {grown[name]:.2f} s more of {name}"


def _parts(answer: Answer) -> dict[str, float]:
    step = answer.step
    name = "launching kernels" if step.launch_bound else "computation"
    compute = {"computation": 0.0, "launching kernels": 0.0, "recomputation": step.recompute_s}
    compute[name] = step.compute_s - step.recompute_s
    return compute | {"bubble": step.bubble_s, "optimizer": step.optimizer_s} | step.parts
