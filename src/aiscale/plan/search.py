"""All layouts of a model on so many devices, ranked, with reasons; and what would make it fit.

Tried: tp up to a node, every pp that layers allow, ep that divides the experts, ZeRO-1 and FSDP,
no, selective and full recomputation, interleaving, cp for long sequences by ring and by all-to-all,
and every micro-batch of 1, 2, 3, 4, 6, 8, 12 and so on that divides a rank's sequences, until none
fits. Memory is asked first, so most layouts cost microseconds.
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
#: NVIDIA's devices from Hopper on. DeepEP wants one of them for experts on several nodes
#: (github.com/deepseek-ai/DeepEP, Requirements).
DEEPEP = ("h100", "h200", "h800", "gh200", "b200", "gb200", "gb300")
LONG = 8_192  #: tokens of a sequence from which context parallelism is tried


def tuned(platform: Platform) -> Software:
    """TUNED; where DeepEP runs, tokens are ordered while they are sent, once to each node."""
    if not platform.name.startswith(DEEPEP):
        return TUNED
    return replace(TUNED, dispatch="by node", fused_order=True)


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
            small = (
                layout
                for bases in meshes(self.shape, self.platform, gpus, batch)
                for layout in variants(self.shape, bases, 1)
                if layout.recompute == "full"
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
    software: Software | None = None,
) -> Ranking:
    """shape: or a model's name; platform: or a machine of the catalogue; software: or `tuned`."""
    shape = shape_named(shape) if isinstance(shape, str) else shape
    platform = platform_of(platform) if isinstance(platform, Machine) else platform
    ranking = Ranking(shape, platform, gpus, global_batch)
    for bases in meshes(shape, platform, gpus, global_batch, precision, software):
        for micro in micro_batches(bases[0]):
            fitted = [_ask(ranking, layout) for layout in variants(shape, bases, micro)]
            # activations grow with the micro-batch: where none fits, no larger one does
            if fitted and not any(fitted):
                break
    ranking.ranked.sort(key=lambda answer: answer.step.total_s)
    ranking.too_large.sort(key=lambda pair: pair[0])
    return ranking


def _ask(ranking: Ranking, layout: Layout) -> bool:
    """Whether the layout fits; the ranking remembers it in either case."""
    ranking.tried += 1
    needed = needed_bytes(ranking.shape, layout, CONSTANTS)
    holds = capacity_bytes(ranking.platform, layout, CONSTANTS)
    if needed > holds:
        ranking.too_large.append(((needed - holds) / 1e9, layout))
        return False
    ranking.ranked.append(predict(ranking.shape, layout, ranking.platform))
    return True


def meshes(
    shape: Shape,
    platform: Platform,
    gpus: int,
    global_batch: int,
    precision: str = "bf16",
    software: Software | None = None,
) -> Iterator[list[Layout]]:
    """Each mesh of ranks that divides the batch, once for each way to exchange experts' tokens and
    keys, with a micro-batch of one sequence."""
    for tp, pp, cp, dp in _meshes(shape, platform, gpus):
        if global_batch % dp:
            continue
        base = Layout(
            dp=dp,
            tp=tp,
            pp=pp,
            cp=cp,
            global_batch=global_batch,
            zero_stage=1 if dp * cp > 1 else 0,
            sequence_parallel=tp > 1,
            precision=precision,
            software=software or tuned(platform),
        )
        kinds = ["ring"]
        if cp > 1 and shape.heads % (tp * cp) == 0:
            kinds.append("all-to-all")
        yield [
            replace(base, ep=ep, cp_kind=kind)
            for ep in _expert_ranks(shape, base)
            for kind in kinds
        ]


def _expert_ranks(shape: Shape, base: Layout) -> list[int]:
    """Powers of two that divide the experts and the ranks of a stage."""
    ranks = base.replicas * base.tp
    sizes = (2**i for i in range(10))
    return [
        ep for ep in sizes if ep == 1 or (shape.experts and shape.experts % ep == ranks % ep == 0)
    ]


def micro_batches(base: Layout) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ..., as far as they divide a rank's sequences."""
    per_rank = base.global_batch // base.dp
    sizes = {2**i * odd for i in range(per_rank.bit_length()) for odd in (1, 3)}
    return sorted(micro for micro in sizes if micro <= per_rank and per_rank % micro == 0)


def variants(shape: Shape, bases: list[Layout], micro: int) -> Iterator[Layout]:
    """The layouts of a mesh with this micro-batch; each passes Layout.check."""
    for base in bases:
        for recompute in ("none", "selective", "full"):
            layout = replace(base, micro_batch=micro, recompute=recompute)
            m = layout.micro_batches
            if m >= layout.pp:
                yield layout
                v = _pieces(shape, layout.pp)
                if v > 1 and m % layout.pp == 0:
                    yield replace(layout, virtual_stages=v, schedule="interleaved")
            if layout.pp == 1 and layout.dp > 1:
                yield replace(layout, fsdp=True, zero_stage=0)


def _meshes(shape: Shape, platform: Platform, gpus: int) -> Iterator[tuple[int, int, int, int]]:
    for tp in (1, 2, 4, 8, 16):
        divides = shape.heads % tp == round(shape.dense_width) % tp == gpus % tp == 0
        if tp > platform.gpus_per_node or not divides:
            continue
        for cp in (1, 2, 4, 8) if shape.seq >= LONG else (1,):
            for pp in range(1, min(shape.layers, gpus // tp) + 1):
                even = shape.layers % pp == 0 or shape.layers / pp >= 3
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
