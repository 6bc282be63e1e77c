"""Compares what ranks do one after the other: their optimizer steps, and the collectives that they
call. Another order hangs, fails, or mixes tensors up."""

from __future__ import annotations

from collections import Counter, defaultdict

from aiscale.measure.referee.causes import DDP
from aiscale.measure.referee.verdict import Cause, Part


def steps_left_out(many: list[dict]) -> Part | None:
    """A rank that takes fewer optimizer steps than others, as it does if only rank 0 takes any.

    Ranks that wait for each other are at most one step apart."""
    if any(trace["ended"] == "lost" for trace in many):
        return None  # what it has done is not known
    taken = [len(trace["digests"]) for trace in many]
    if max(taken) - min(taken) < 2:
        return None
    behind = [rank for rank, steps in enumerate(taken) if steps < max(taken) - 1]
    words = "these ranks take no step where others take one"
    cause = Cause(words, "call the optimizer's step on all ranks, or send the new weights", DDP)
    where = f"{max(taken)} optimizer steps on some ranks, {min(taken)} on others"
    return Part(min(taken), "optimizer steps", where, cause, ranks=f"ranks {behind}")


def first_difference(many: list[dict], one: list[dict]) -> Part | None:
    """The first collective of a group that one of its ranks calls differently, or not at all."""
    aliases = {name: names[0] for names in one[0]["tied"] for name in names} if one else {}
    groups: dict[tuple, dict[int, list]] = defaultdict(dict)
    for trace in many:
        for entry in trace["sent"]:
            mine = groups[tuple(entry["ranks"])].setdefault(trace["rank"], [])
            mine.append(
                (
                    entry["operation"],
                    _shape(entry),
                    aliases.get(entry["of"], entry["of"]),
                    entry["step"],
                )
            )
    all_ended = all(trace["ended"] in ("steps", "script") for trace in many)
    for ranks, lists in groups.items():
        if all_ended:
            for rank in set(ranks) - set(lists):
                lists[rank] = []
        part = _first_in(ranks, lists, all_ended)
        if part:
            return part
    return None


def _shape(entry: dict) -> tuple | None:
    return tuple(entry["shape"]) if entry["shape"] is not None else None


def _first_in(ranks: tuple, lists: dict[int, list], all_ended: bool) -> Part | None:
    for number in range(max(map(len, lists.values()))):
        called = {rank: mine[number] for rank, mine in lists.items() if number < len(mine)}
        kinds = Counter(entry[:3] for entry in called.values())
        if len(kinds) == 1 and (len(called) == len(lists) or not all_ended):
            continue
        usual = kinds.most_common(1)[0][0]
        odd = next(
            rank for rank in sorted(lists) if rank not in called or called[rank][:3] != usual
        )
        theirs = _words(called[odd]) if odd in called else "nothing"
        where = f"number {number} of ranks {list(ranks)}: {_words(usual)}"
        cause = Cause(
            "ranks call collectives in another order, of other shapes, or another number of times",
            "look for a condition on the rank or its data around the call",
            "09_when_it_goes_wrong",
        )
        step = next(iter(called.values()))[3]
        return Part(step, "order of collectives", where, cause, ranks=f"rank {odd} calls {theirs}")
    return None


def _words(entry: tuple) -> str:
    operation, shape, name = entry[:3]
    return f"{operation} {list(shape or ())}" + (f" of the gradient of {name}" if name else "")
