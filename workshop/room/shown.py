"""What the wall shows of a question: counts without seats, and no more than its stage allows."""

import math
from bisect import bisect
from collections import Counter
from itertools import pairwise
from statistics import median, median_low

HIDDEN, FIRST, AGAIN, SECOND, TRUTH = range(5)  # the stages of a question
PREFIXES = ("n", "µ", "m", "", "k", "M", "G", "T", "P")


def shown(question: dict) -> dict:
    """`first` and `latest` are counts: of votes for each label, or of wrong ones for each cell of a grid."""
    form, stage = question["form"], question["stage"]
    votes = [vote for vote in question["votes"].values() if vote["first"] is not None]
    truths = [vote["truth"] for vote in question["votes"].values() if vote["truth"] is not None]
    truth = usual(form, truths) if stage == TRUTH and truths else None
    page = {name: value for name, value in question.items() if name != "votes"}
    page |= {"guessed": len(votes), "again": sum(vote["second"] is not None for vote in votes), "truth": truth}
    if stage == HIDDEN or not votes:
        return page
    first = [vote["first"] for vote in votes]
    latest = [vote_at(stage, vote) for vote in votes]
    page["held"] = [held(first, truth), held(latest, truth)]
    draw = {"number": numbers, "choice": choices, "grid": grid}[form]
    return page | draw(question, first, latest, truth)


def vote_at(stage: int, vote: dict) -> object:
    return vote["first"] if vote["second"] is None or stage < SECOND else vote["second"]


def held(guesses: list, truth: object) -> int:
    return sum(holds(guess, truth) for guess in guesses)


def numbers(question: dict, first: list, latest: list, truth: float | None) -> dict:
    edges, unit = bins([*first, *latest, *([] if truth is None else [truth])]), question["unit"]
    names = [rounded(edge, unit, 2) for edge in edges]
    labels = [f"under {names[0]}", *map(" to ".join, pairwise(names)), f"{names[-1]} and more"]
    page = {"labels": labels, "first": counts(first, edges), "latest": counts(latest, edges)}
    if truth is None:
        return page
    said = f"{truth:,} {unit}".strip() if isinstance(truth, int) else rounded(truth, unit, 4)
    return page | {"right": bisect(edges, truth), "said": said}


def choices(question: dict, first: list, latest: list, truth: int | None) -> dict:
    labels = question["choices"]
    edges = range(1, len(labels))
    page = {"labels": labels, "first": counts(first, edges), "latest": counts(latest, edges)}
    return page if truth is None else page | {"right": truth, "said": labels[truth]}


def grid(question: dict, first: list, latest: list, truth: list | None) -> dict:
    right = truth or usual("grid", latest)  # as long as the truth is hidden: the commonest
    return {"first": wrong(first, right), "latest": wrong(latest, right), "said": "The truth"}


def usual(form: str, values: list) -> object:
    """What most seats have: a median, the commonest choice, the commonest content of each cell."""
    if form == "number":
        return median_low(values)
    if form == "choice":
        return Counter(values).most_common(1)[0][0]
    return [usual("choice", cell) for cell in zip(*values, strict=True)]


def wrong(grids: list, right: list) -> list:
    found = []
    for cell, *guesses in zip(right, *grids, strict=True):
        found.append(sum(guess != cell for guess in guesses))
    return found


def holds(guess: object, truth: object) -> bool:
    """As `predict` says right or close, which choices and grids are not."""
    close = isinstance(guess, float | int) and truth and 1 / 1.1 <= guess / truth <= 1.1
    return guess == truth or bool(close)


def counts(guesses: list, edges: list) -> list:
    """How many are below the first edge, between each two, and not below the last."""
    there = Counter(bisect(edges, guess) for guess in guesses)
    return [there[i] for i in range(len(edges) + 1)]


def bins(values: list) -> list:
    """Edges in equal steps on a logarithmic axis: eight at most, within three decades of the median."""
    sizes = [math.log10(value) for value in values if value > 0] or [0]
    middle = median(sizes)
    low, high = max(min(sizes), middle - 3), min(max(sizes), middle + 3)
    steps = next(each for each in (10, 3, 1) if (high - low) * each <= 6)
    return [10 ** (at / steps) for at in range(math.floor(low * steps), math.floor(high * steps) + 2)]


def rounded(value: float, unit: str, digits: int) -> str:
    third = math.floor(math.log10(abs(value)) / 3 + 1e-9) if value else 0
    third = max(-3, min(0, third)) if unit == "s" else max(0, min(5, third))
    number = float(f"{value / 1000**third:.{digits}g}")
    return f"{number:g} {PREFIXES[third + 3]}{'B' if unit == 'bytes' else unit}".strip()
