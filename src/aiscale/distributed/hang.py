"""Who keeps the others waiting: a judgement over what all ranks have begun.

    hang = find({0: Told(...), 1: Told(...)}, silent={2}, timeout_s=240)
    hang.text, hang.waiting, hang.missing

In each group ranks begin the same collectives in the same order. So one that has begun fewer than another, for longer
than the timeout, has not arrived. Of several the one to name is that which waits for nobody itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from aiscale.distributed.progress import ANY_SOURCE, members, message

_NAMED = 8  #: ranks that one line names
#: of these, all ranks must give the same number of bytes
_ALIKE = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


@dataclass(frozen=True)
class Told:
    """What a rank says of itself."""

    step: int = 0
    where: str = ""  #: file:line in function, of its main thread
    left: bool = False  #: it trains no more
    begun: dict[str, list] = field(default_factory=dict)  #: Progress.table()
    busy: bool = False  #: it has just begun something and does not say what

    def number(self, group: str) -> int:
        """How many collectives of a group it has begun."""
        return self.begun[group][0] if group in self.begun else 0

    @property
    def idle_s(self) -> float:
        """Since it began anything."""
        return min((age for *_, age, _ in self.begun.values()), default=float("inf"))


@dataclass(frozen=True)
class Hang:
    """A collective that does not come to its end."""

    waiting: list[int]  #: ranks that have begun it
    missing: list[int]  #: ranks that have not, or do not answer
    text: str  #: one line


@dataclass(frozen=True)
class _Pending:
    group: str
    entry: list  #: of a rank that waits, as in Progress.table()
    waiting: list[int]
    behind: list[int]


def find(told: dict[int, Told], *, silent: set[int], timeout_s: float) -> Hang | None:
    """The hang that explains the others, or None. `silent`: ranks whose news are as old as the timeout."""
    if any(of.busy for rank, of in told.items() if rank not in silent):
        return None
    if silent:
        return _of_silent(told, silent, timeout_s)
    # Who keeps a rank waiting may itself have begun to wait a little later: that counts, too, once one is due.
    pending = [found for group in _groups(told) if (found := _pending(group, told, timeout_s / 2))]
    if all(each.entry[3] < timeout_s for each in pending):
        return next(filter(None, (_mismatch(group, told, timeout_s) for group in _groups(told))), None)
    waits = {rank for each in pending for rank in each.waiting}
    behind = {rank for each in pending for rank in each.behind}
    # Where each waits for another, the one that stopped first.
    missing = behind - waits or {max(behind, key=lambda rank: (told[rank].left, told[rank].idle_s))}
    worst = max(pending, key=lambda each: len(missing.intersection(each.behind)))
    missing = sorted(missing.intersection(worst.behind))
    return Hang(worst.waiting, missing, f"{_operation(worst, timeout_s)}: {_absent(missing, worst, told)}")


def _groups(told: dict[int, Told]) -> list[str]:
    return sorted({group for rank in told.values() for group in rank.begun})


def _pending(group: str, told: dict[int, Told], longer_than_s: float) -> _Pending | None:
    ranks = [rank for rank in members(group) if rank in told]
    if ">" in group and any(message(ANY_SOURCE, rank) in told[rank].begun for rank in ranks):
        return None  # who receives from anybody does not say from whom
    first = max(told[rank].number(group) for rank in ranks)
    waiting = [rank for rank in ranks if told[rank].number(group) == first]
    behind = [rank for rank in ranks if told[rank].number(group) < first]
    entry = max((told[rank].begun[group] for rank in waiting), key=lambda entry: entry[3])
    if not behind or entry[3] < longer_than_s:
        return None
    return _Pending(group, entry, waiting, behind)


def _mismatch(group: str, told: dict[int, Told], timeout_s: float) -> Hang | None:
    """All have begun as many, but not the same."""
    ranks = [rank for rank in members(group) if rank in told and group in told[rank].begun]
    entries = {rank: told[rank].begun[group] for rank in ranks}
    if ">" in group or any(entry[3] < timeout_s for entry in entries.values()):
        return None
    kinds: dict[str, list[int]] = {}
    for rank, (_, op, nbytes, *_) in entries.items():
        kinds.setdefault(f"{op} of {nbytes:,} bytes" if op in _ALIKE else op, []).append(rank)
    if len(kinds) < 2:
        return None
    # Most ranks are taken to be right.
    (usual, right), *others = sorted(kinds.items(), key=lambda kind: (-len(kind[1]), kind[1]))
    number, *_, step = entries[right[0]]
    text = (
        f"{usual} in group {group}, number {number}, begun in step {step}, was not finished within {timeout_s:g} s: "
        + "; ".join(f"{_ranks(wrong)} began {what} instead" for what, wrong in others)
        + ": it skipped a collective or made one more than the others"
    )
    return Hang(right, sorted(rank for _, wrong in others for rank in wrong), text)


def _of_silent(told: dict[int, Told], silent: set[int], timeout_s: float) -> Hang:
    missing, waiting = sorted(silent), sorted(set(told) - silent)
    why = f"{_ranks(missing)} no longer answer{'s' * (len(missing) == 1)}: stopped, out of memory, or the node is gone"
    # It may have begun the collective before it fell silent: then no count shows it.
    ops = [(entry, group) for rank in waiting for group, entry in told[rank].begun.items()]
    ops = [(entry, group) for entry, group in ops if silent.intersection(members(group)) and entry[3] >= timeout_s / 2]
    if not ops:
        return Hang(waiting, missing, f"nothing was begun for {timeout_s:g} s: {why}")
    entry, group = min(ops, key=lambda op: op[0][3])
    return Hang(waiting, missing, f"{_operation(_Pending(group, entry, waiting, missing), timeout_s)}: {why}")


def _operation(pending: _Pending, timeout_s: float) -> str:
    number, op, nbytes, _, step = pending.entry
    size = f" of {nbytes:,} bytes" if nbytes else ""
    if ">" in pending.group:
        source, _, target = pending.group.partition(">")
        what = f"{op}{size} from rank {source} to rank {target}"
    else:
        what = f"{op}{size} in group {pending.group}"
    return f"{what}, number {number}, begun in step {step}, was not finished within {timeout_s:g} s"


def _absent(missing: list[int], pending: _Pending, told: dict[int, Told]) -> str:
    one = told[missing[0]]
    if one.left:
        doing = "trains no more"
    else:
        doing = f"is in step {one.step}" + (f" at {one.where}" if one.where else "")
    last = one.begun.get(pending.group)
    came = f", its last one there was number {last[0]}, {last[1]}" if last else ""
    if len(missing) > 1:
        return f"{_ranks(missing)} did not come to it; rank {missing[0]} {doing}{came}"
    return f"{_ranks(missing)} did not come to it; it {doing}{came}"


def _ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_NAMED]))}{more}"
