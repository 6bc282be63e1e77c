"""Compares an answer with what is right; says how it differs: scale, sign, order, axes, rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

compared: list[str] = []  #: what this grading has compared so far


class Wrong(Exception):
    """An answer is not right; the message says in which way."""


def require(holds: bool, message: str) -> None:
    """Refuse the answer with this message unless something holds."""
    compared.append(message)
    if not holds:
        raise Wrong(message)


def same(
    actual: object,
    expected: object,
    what: str,
    *,
    scale: Mapping[float, str] | None = None,
    causes: Mapping[str, object] | None = None,
    rtol: float = 1e-5,
) -> None:
    """Refuse the answer if numbers differ by more than `rtol` of the largest, and say in which way.

    scale: actual / expected -> what was probably missed. causes: message -> the value that this
    mistake would give.
    """
    compared.append(what)
    if difference := _difference(actual, expected, what, scale or {}, causes or {}, rtol):
        raise Wrong(difference)


def same_on_ranks(actual: Sequence, expected: Sequence, what: str, **how: Any) -> None:
    """As `same`, for all ranks' results in rank order; `causes` hold values in rank order, too."""
    compared.append(what)
    causes, rtol = how.pop("causes", None) or {}, how.get("rtol", 1e-5)
    wrong = [
        rank for rank in range(len(expected)) if not _close(actual[rank], expected[rank], rtol)
    ]
    if not wrong:
        return
    for text, values in causes.items():
        if all(_close(mine, value, rtol) for mine, value in zip(actual, values, strict=True)):
            raise Wrong(f"{what}: {text}")
    n = len(expected)
    for k in range(1, n):
        if all(_close(actual[r], expected[(r + k) % n], rtol) for r in range(n)):
            raise Wrong(
                f"{what}: each rank r has what rank (r + {k}) % {n} should have: off by {k}"
            )
    differences = [
        _difference(actual[r], expected[r], what, how.get("scale") or {}, {}, rtol) for r in wrong
    ]
    alike = len(wrong) == n and len(set(differences)) == 1
    where = "every rank" if alike else f"rank {wrong[0]}"
    raise Wrong(differences[0].replace(what, f"{what} on {where}", 1))


def _difference(actual, expected, what: str, scale: Mapping, causes: Mapping, rtol: float) -> str:
    """How two values differ, in words; empty if they agree."""
    if actual is None:
        return f"{what} is None: does the function return it?"
    mine, truth = _numbers(actual), _numbers(expected)
    if mine is None:
        return f"{what} is {type(actual).__name__} {str(actual)[:60]!r}, but it must be numbers"
    if _close(actual, expected, rtol):
        return ""
    for text, value in causes.items():
        if _close(actual, value, rtol):
            return f"{what}: {text}"
    if mine.shape != truth.shape:
        turned = " (the axes are swapped)" if mine.shape == truth.shape[::-1] else ""
        return f"{what} has the shape {mine.shape}, but it must have {truth.shape}{turned}"
    square = float((truth * truth).sum())
    ratio = float((mine * truth).sum()) / square if square else 0.0
    if ratio and np.allclose(
        mine, ratio * truth, rtol=0, atol=rtol * abs(ratio) * np.abs(truth).max()
    ):
        why = next((text for key, text in scale.items() if abs(ratio / key - 1) < 0.001), "")
        part = abs(ratio) < 1 and abs(1 / ratio - round(1 / ratio)) < 0.001
        factor = f"1/{round(1 / ratio)} of" if part else f"{ratio:.4g} times"
        how = "the negative of" if abs(ratio + 1) < 1e-6 else factor
        return f"{what} is {how} what it should be" + (f": {why}" if why else "")
    if mine.ndim and _close(np.sort(mine, None), np.sort(truth, None), rtol):
        return f"{what} has the right numbers in the wrong order: {_first(mine, truth, rtol)}"
    return f"{what} is wrong: {_first(mine, truth, rtol)}"


def _first(mine, truth, rtol: float) -> str:
    if not mine.ndim:
        return f"it is {mine:.6g}, and it should be {truth:.6g}"
    off = np.argwhere(np.abs(mine - truth) > rtol * np.abs(truth).max())
    place = tuple(int(i) for i in off[0])
    right = f"{mine.size - len(off)} of {mine.size} numbers are right; the first wrong one, "
    return f"{right}at {list(place)}, is {mine[place]:.6g} and should be {truth[place]:.6g}"


def _numbers(value: object):
    """The value as an array of float64, or None."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().double()
    try:
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        return None


def _close(actual: object, expected: object, rtol: float) -> bool:
    mine, truth = _numbers(actual), _numbers(expected)
    if mine is None or mine.shape != truth.shape:
        return False
    return bool(
        np.allclose(mine, truth, rtol=0, atol=rtol * (np.abs(truth).max() if truth.size else 0))
    )
