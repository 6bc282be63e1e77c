"""Pipeline schedules: the order of work on each rank, the bubble, and the micro-batches in flight.

    schedule_order("1f1b", pp=4, n_micro=8)[3]                # rank 3: [Work("forward", 3, 0), ...]
    pipeline_timeline("1f1b", 4, 8, 1, forward_s=0.1, backward_s=0.2)  # events for plots.pipeline
    bubble("interleaved", pp=4, n_micro=8, virtual_stages=2)  # the formula: idle / busy = 3 / 16

Bubble time over work time: (p - 1) / m for GPipe and 1F1B, (p - 1) / (v m) interleaved (Narayanan
et al. 2021), with p stages (pp), m micro-batches (n_micro), v pieces of the model on each rank
(virtual_stages).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from aiscale.errors import ConfigError
from aiscale.plan.cost.timelines import Event

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]


class Work(NamedTuple):
    """One pass of one micro-batch through one piece."""

    #: forward, backward (with zero-bubble only its input half), weights (the weight half)
    kind: str
    piece: int  #: of the model, 0 .. p v - 1
    micro_batch: int


def stage_ranks(pp: int, virtual_stages: int = 1) -> list[int]:
    """The pipeline rank of each piece of the model: round robin."""
    return [*range(pp)] * virtual_stages


def bubble(schedule: Schedule, pp: int, n_micro: int, virtual_stages: int = 1) -> float:
    """A rank's idle over its busy time, if all pieces take equally long and messages no time.

    Zero-bubble, with a forward pass as long as each half of the backward pass: (p - 1) / (3 m)
    (ZB-H1, Qi et al. 2023).
    """
    _check(schedule, pp, n_micro, virtual_stages)
    if schedule == "zero-bubble":
        if n_micro < pp:
            return max(idle_share(pipeline_timeline(schedule, pp, n_micro)))
        return (pp - 1) / (3 * n_micro)
    return (pp - 1) / (virtual_stages * n_micro)


def in_flight(schedule: Schedule, pp: int, n_micro: int, virtual_stages: int = 1) -> list[float]:
    """Micro-batches whose activations each rank holds at its peak, in units of all its pieces:
    GPipe m, 1F1B min(m, p - rank). The backward pass frees activations; if it is split, its second
    half does."""
    peaks = []
    for work in schedule_order(schedule, pp, n_micro, virtual_stages):
        cut, in_stage, peak = any(kind == "weights" for kind, _, _ in work), 0, 0
        for kind, _, _ in work:
            in_stage += {"forward": 1, "backward": 0 if cut else -1, "weights": -1}[kind]
            peak = max(peak, in_stage)
        peaks.append(peak / virtual_stages)
    return peaks


def schedule_order(
    schedule: Schedule, pp: int, n_micro: int, virtual_stages: int = 1
) -> list[list[Work]]:
    """The work of each rank in order, as torch.distributed.pipelining runs it."""
    _check(schedule, pp, n_micro, virtual_stages)
    if schedule == "gpipe":
        return [
            [Work(kind, rank, i) for kind in ("forward", "backward") for i in range(n_micro)]
            for rank in range(pp)
        ]
    return [
        _one_forward_one_backward(schedule, rank, pp, n_micro, virtual_stages) for rank in range(pp)
    ]


def pipeline_timeline(
    schedule: Schedule,
    pp: int,
    n_micro: int,
    virtual_stages: int = 1,
    forward_s: float | Sequence[float] = 1.0,
    backward_s: float | Sequence[float] = 2.0,
    *,
    message_s: float = 0.0,
) -> list[Event]:
    """Simulate a step: every rank works in the schedule's order, as soon as its inputs are there.

    forward_s and backward_s: of one micro-batch in all pieces of one rank, or of each rank;
    zero-bubble's halves take half each.
    """
    orders = schedule_order(schedule, pp, n_micro, virtual_stages)
    ranks = stage_ranks(pp, virtual_stages)
    halves = 2 if schedule == "zero-bubble" else 1
    forward, backward = (
        [x] * pp if isinstance(x, (int, float)) else x for x in (forward_s, backward_s)
    )
    seconds = [
        {"forward": f, "backward": b / halves, "weights": b / halves}
        for f, b in zip(forward, backward, strict=True)
    ]
    done: dict[Work, float] = {}
    free, at, events = [0.0] * pp, [0] * pp, []
    while any(at[rank] < len(orders[rank]) for rank in range(pp)):
        for rank, order in enumerate(orders):
            while at[rank] < len(order) and all(
                need in done for need in _needs(order[at[rank]], len(ranks))
            ):
                work = order[at[rank]]
                arrivals = [
                    done[need] + (message_s if ranks[need.piece] != rank else 0.0)
                    for need in _needs(work, len(ranks))
                ]
                start = max([free[rank], *arrivals])
                free[rank] = done[work] = start + seconds[rank][work.kind] / virtual_stages
                events.append(
                    Event(rank, event_name(work, pp, virtual_stages), start, free[rank], work.kind)
                )
                at[rank] += 1
    return sorted(events, key=lambda event: event.start_s)


def event_name(work: Work, pp: int, virtual_stages: int) -> str:
    """The micro-batch, "3"; with several pieces a rank also the piece's number there, "3.1"."""
    return f"{work.micro_batch}.{work.piece // pp}" if virtual_stages > 1 else str(work.micro_batch)


def idle_share(events: Sequence[Event]) -> list[float]:
    """`bubble` of a timeline: each rank's idle over busy time, from the first event to the last."""
    span = max(event.end_s for event in events) - min(event.start_s for event in events)
    busy: Counter[int] = Counter()
    for event in events:
        busy[event.rank] += event.end_s - event.start_s
    return [(span - busy[rank]) / busy[rank] for rank in sorted(busy)]


def _needs(work: Work, pieces: int) -> list[Work]:
    """The work that must be done before `work`."""
    kind, piece, i = work
    if kind == "weights":
        return [Work("backward", piece, i)]
    if kind == "forward":
        return [Work(kind, piece - 1, i)] if piece else []
    return [Work("forward", piece, i), *([Work(kind, piece + 1, i)] if piece < pieces - 1 else [])]


def _one_forward_one_backward(
    schedule: Schedule, rank: int, pp: int, n_micro: int, v: int
) -> list[Work]:
    """1F1B and its interleaved and zero-bubble forms.

    Some forward passes, then alternating forward and backward, then the remaining backward passes;
    zero-bubble delays `rank` weight passes.
    """
    # Micro-batches per piece before the next piece.
    a_round = pp if schedule == "interleaved" else n_micro
    total, far = n_micro * v, pp - 1 - rank
    warm_up = min(total, (2 * far if schedule == "interleaved" else far) + (v - 1) * a_round)
    seen: Counter[tuple[str, int]] = Counter()

    def next_work(kind: str, step: int) -> Work:
        turn = (step // a_round) % v
        piece = (turn if kind == "forward" else v - 1 - turn) * pp + rank
        seen[kind, piece] += 1
        return Work(kind, piece, seen[kind, piece] - 1)

    order = [next_work("forward", step) for step in range(warm_up)]
    weights = 0
    for step in range(total):
        if warm_up + step < total:
            order.append(next_work("forward", warm_up + step))
        order.append(next_work("backward", step))
        if schedule == "zero-bubble" and step >= rank:
            order.append(next_work("weights", weights))
            weights += 1
    if schedule == "zero-bubble":
        order += [next_work("weights", step) for step in range(weights, total)]
    return order


def _check(schedule: Schedule, pp: int, n_micro: int, virtual_stages: int) -> None:
    if schedule not in ("gpipe", "1f1b", "interleaved", "zero-bubble"):
        raise ConfigError(
            f"schedule is {schedule!r}: it must be gpipe, 1f1b, interleaved or zero-bubble"
        )
    if schedule != "interleaved" and virtual_stages > 1:
        raise ConfigError(
            f"virtual_stages {virtual_stages} with {schedule}: it takes one piece a rank"
        )
    if schedule == "interleaved" and n_micro % pp:
        raise ConfigError(
            f"{n_micro} micro-batches with pp {pp}: the interleaved schedule takes a "
            "multiple of pp, else ranks wait for each other"
        )
