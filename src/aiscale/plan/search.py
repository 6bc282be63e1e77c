"""All layouts of a model on so many devices, ranked, with reasons; and what would make it fit.

Tried: tp up to a node, every pp that layers allow, ZeRO-1 and FSDP, no and full recomputation,
micro-batches of 1 to 16, interleaving, cp for long sequences. Memory is asked first, so most
layouts cost microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from aiscale.errors import ConfigError
from aiscale.plan.answer import Answer, predict
from aiscale.plan.constants import CONSTANTS
from aiscale.plan.hardware import Platform, platform_of
from aiscale.plan.layout import PROGRAMS, Layout, Shape, Software, shape_named
from aiscale.plan.machines import Machine
from aiscale.plan.memory import capacity_bytes, fits, needed_bytes

#: A framework that trains at scale today: as Megatron; weights return in the next forward pass.
TUNED = replace(PROGRAMS["megatron"], program="", gather_overlap=True)
LONG = 16_384  #: tokens of a sequence from which context parallelism is tried


@dataclass
class Ranking:
    """The result of a search."""

    shape: Shape
    platform: Platform
    gpus: int
    global_batch: int
    tried: int = 0
    ranked: list[Answer] = field(default_factory=list)  #: fitting, fastest first
    #: (GB over capacity, layout), least first
    too_large: list[tuple[float, Layout]] = field(default_factory=list)

    @property
    def best(self) -> Answer:
        if not self.ranked:
            raise ConfigError(self.advice())
        return self.ranked[0]

    def reasons(self, most: int = 8) -> list[tuple[Answer, str]]:
        """The next best layouts, each with what makes it slower than the best."""
        return [(answer, reason(answer, self.best)) for answer in self.ranked[1 : most + 1]]

    def advice(self) -> str:
        """One line: by how much the smallest layout exceeds a device, and what makes it fit."""
        if not self.tried:
            return (
                f"no layout puts {self.global_batch} sequences on {self.gpus} devices: "
                "dp x micro_batch must divide global_batch: raise the batch, or take fewer nodes"
            )
        over, layout = self.too_large[0]
        needs = (
            f"the smallest layout ({layout.name()}) needs {over:.0f} GB a device more than there is"
        )
        for gpus in (self.gpus * 2**n for n in range(1, 8)):
            batch = max(self.global_batch, gpus // 8)
            layouts = candidates(self.shape, self.platform, gpus, batch)
            small = (
                layout
                for layout in layouts
                if layout.recompute == "full" and layout.micro_batch == 1
            )
            if any(fits(self.shape, layout, self.platform, CONSTANTS) for layout in small):
                more = f" with {batch} sequences a step" if batch > self.global_batch else ""
                return (
                    f"{needs}; it would fit with {-(-gpus // self.platform.gpus_per_node)} nodes"
                    f"{more}"
                )
        return f"{needs}; it would fit with shorter sequences or a smaller model"


def search(
    shape: Shape | str,
    platform: Platform | Machine,
    gpus: int,
    global_batch: int,
    precision: str = "bf16",
    software: Software = TUNED,
) -> Ranking:
    """shape: or a model's name; platform: or a machine of the catalogue."""
    shape = shape_named(shape) if isinstance(shape, str) else shape
    platform = platform_of(platform) if isinstance(platform, Machine) else platform
    ranking = Ranking(shape, platform, gpus, global_batch)
    for layout in candidates(shape, platform, gpus, global_batch, precision, software):
        ranking.tried += 1
        needed = needed_bytes(shape, layout, CONSTANTS)
        holds = capacity_bytes(platform, layout, CONSTANTS)
        if needed > holds:
            ranking.too_large.append(((needed - holds) / 1e9, layout))
        else:
            ranking.ranked.append(predict(shape, layout, platform))
    ranking.ranked.sort(key=lambda answer: answer.step.total_s)
    ranking.too_large.sort(key=lambda pair: pair[0])
    return ranking


def candidates(
    shape: Shape,
    platform: Platform,
    gpus: int,
    global_batch: int,
    precision: str = "bf16",
    software: Software = TUNED,
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
                    dp=dp,
                    tp=tp,
                    pp=pp,
                    cp=cp,
                    micro_batch=micro,
                    global_batch=global_batch,
                    recompute=recompute,
                    zero_stage=1 if dp * cp > 1 else 0,
                    sequence_parallel=tp > 1,
                    precision=precision,
                    software=software,
                )
                if m >= pp:
                    yield base
                    v = _pieces(shape, pp)
                    if v > 1 and m % pp == 0:
                        yield replace(base, virtual_stages=v, schedule="interleaved")
                if pp == 1 and dp > 1:
                    yield replace(base, fsdp=True, zero_stage=0)


def _meshes(shape: Shape, platform: Platform, gpus: int) -> Iterator[tuple[int, int, int, int]]:
    for tp in (1, 2, 4, 8, 16):
        if tp > platform.gpus_per_node or shape.heads % tp or shape.width % tp or gpus % tp:
            continue
        for cp in (1, 2, 4, 8) if shape.seq >= LONG else (1,):
            for pp in range(1, min(shape.layers, gpus // tp) + 1):
                even = shape.layers % pp == 0 or shape.layers / pp >= 4
                if even and gpus % (tp * pp * cp) == 0:
                    yield tp, pp, cp, gpus // (tp * pp * cp)


def _pieces(shape: Shape, pp: int) -> int:
    """Virtual stages of at least two layers, four pieces at most."""
    if pp < 3 or shape.layers % pp:
        return 1
    per = shape.layers // pp
    return max((v for v in (1, 2, 3, 4) if per % v == 0 and per // v >= 2), default=1)


def reason(answer: Answer, best: Answer) -> str:
    """What costs this layout most beside the best: the part that grew most."""
    mine, others = answer.step.causes(), best.step.causes()
    grown = {name: mine[name] - others[name] for name in mine}
    most = max(grown, key=grown.__getitem__)
    name = "launching kernels" if most == "computation" and answer.step.launch_bound else most
    slower = 100 * (answer.step.total_s / best.step.total_s - 1)
    return f"{slower:.0f} % slower: {grown[most]:.2f} s more of {name}"
