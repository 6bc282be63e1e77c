"""The few of NumPy's functions that the puzzles use, in plain Python: a web page has no NumPy (`page`).

    sys.modules["numpy"] = arrays        # then `import numpy as np` in the other modules gives this one

An array is a view of a flat list, as in NumPy: a part of a layer's parameters lies in the memory of the whole.
`tests/test_puzzles.py` runs all puzzles with it.
"""

from __future__ import annotations

import builtins
import itertools
import math
import operator
import random as _random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace


class Array:
    """Numbers of a shape; element (i, j, ...) is numbers[start + i * steps[0] + j * steps[1] + ...]."""

    def __init__(self, numbers: list, shape: Sequence[int], start: int = 0, steps: Sequence[int] | None = None) -> None:
        self.numbers, self.shape, self.start = numbers, tuple(shape), start
        self.steps = tuple(steps) if steps is not None else _steps(self.shape)

    def places(self) -> Iterator[int]:
        """Of the elements in `numbers`, the last index fastest."""
        for index in itertools.product(*map(range, self.shape)):
            yield self.start + builtins.sum(map(operator.mul, index, self.steps))

    def flat(self) -> list:
        return [self.numbers[place] for place in self.places()]

    def copy(self) -> Array:
        return Array(self.flat(), self.shape)

    def ravel(self) -> Array:
        return Array(self.flat(), (math.prod(self.shape),))

    @property
    def T(self) -> Array:
        return Array(self.numbers, self.shape[::-1], self.start, self.steps[::-1])

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: object) -> Array | float:
        keys = key if isinstance(key, tuple) else (key,)
        start, shape, steps = self.start, [], []
        for axis, size in enumerate(self.shape):
            step = self.steps[axis]
            at = keys[axis] if axis < len(keys) else slice(None)
            if isinstance(at, slice):
                chosen = range(size)[at]
                start += chosen.start * step
                shape.append(len(chosen))
                steps.append(chosen.step * step)
            else:
                start += range(size)[at] * step
        return Array(self.numbers, shape, start, steps) if shape else self.numbers[start]

    def __setitem__(self, key: object, values: object) -> None:
        target = self if key is Ellipsis else self[key]
        if not isinstance(target, Array):  # one number
            keys = key if isinstance(key, tuple) else (key,)
            place = builtins.sum(range(n)[i] * step for n, i, step in zip(self.shape, keys, self.steps, strict=True))
            self.numbers[self.start + place] = values
            return
        new = array(values)
        if new.shape != target.shape:
            raise ValueError(f"an array of shape {new.shape} does not fit into one of {target.shape}")
        for place, value in zip(target.places(), new.flat(), strict=True):
            self.numbers[place] = value

    def _with(self, other: object, call: Callable) -> Array:
        if not isinstance(other, Array):
            return Array([call(mine, other) for mine in self.flat()], self.shape)
        if other.shape != self.shape:
            raise ValueError(f"arrays of shapes {self.shape} and {other.shape} do not go together")
        return Array(list(map(call, self.flat(), other.flat())), self.shape)

    def __add__(self, other: object) -> Array:
        return self._with(other, operator.add)

    def __sub__(self, other: object) -> Array:
        return self._with(other, operator.sub)

    def __mul__(self, other: object) -> Array:
        return self._with(other, operator.mul)

    def __truediv__(self, other: object) -> Array:
        return self._with(other, operator.truediv)

    def __pow__(self, other: object) -> Array:
        return self._with(other, operator.pow)

    def __rsub__(self, other: float) -> Array:
        return Array([other - mine for mine in self.flat()], self.shape)

    __radd__, __rmul__ = __add__, __mul__

    def __isub__(self, other: object) -> Array:
        self[...] = self - other
        return self

    def __matmul__(self, other: Array) -> Array | float:
        """Of a matrix or a vector with a vector."""
        if len(self.shape) == 1:
            return builtins.sum(map(operator.mul, self.flat(), other.flat()))
        return Array([row @ other for row in self], (len(self),))

    def sum(self, axis: int | None = None) -> Array | float:
        return builtins.sum(self.flat()) if axis is None else builtins.sum(self)

    def mean(self, axis: int) -> Array:
        return self.sum(axis) / len(self)

    def any(self) -> bool:
        return builtins.any(self.flat())

    def __repr__(self) -> str:
        return f"array({[row.flat() if isinstance(row, Array) else row for row in self]})"


def _steps(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def array(values: object) -> Array:
    """Of a list of numbers or of arrays of one shape."""
    if isinstance(values, Array):
        return values
    inner = [array(value) for value in values] if isinstance(values[0], list | tuple | Array) else []
    if not inner:
        return Array(list(values), (len(values),))
    return Array([number for each in inner for number in each.flat()], (len(inner), *inner[0].shape))


def empty(shape: Sequence[int] | int) -> Array:
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    return Array([0.0] * math.prod(shape), shape)


zeros = empty


def zeros_like(x: Array) -> Array:
    return empty(x.shape)


def ones_like(x: Array) -> Array:
    return Array([1.0] * math.prod(x.shape), x.shape)


def tanh(x: Array) -> Array:
    return Array(list(map(math.tanh, x.flat())), x.shape)


def outer(x: Array, y: Array) -> Array:
    return Array([a * b for a in x.flat() for b in y.flat()], (len(x), len(y)))


def array_split(x: Array, parts: int, axis: int = 0) -> list[Array]:
    """Views; the first ones have a row more where it does not divide."""
    whole, rest = divmod(x.shape[axis], parts)
    ends = [0, *itertools.accumulate(whole + (part < rest) for part in range(parts))]
    before = (slice(None),) * axis
    return [x[(*before, slice(begin, end))] for begin, end in itertools.pairwise(ends)]


def concatenate(parts: Sequence[Array]) -> Array:
    return array([row for part in parts for row in part])


def isclose(a: float, b: float, atol: float = 1e-8) -> bool:
    return abs(a - b) <= atol + 1e-5 * abs(b)


def allclose(a: Array | float, b: Array | float, atol: float = 1e-8) -> bool:
    if not isinstance(a, Array):
        return isclose(a, b, atol)
    others = b.flat() if isinstance(b, Array) else [b] * math.prod(a.shape)
    return all(isclose(x, y, atol) for x, y in zip(a.flat(), others, strict=True))


class _Generator:
    def __init__(self, seed: int | None = None) -> None:
        self._draw = _random.Random(seed)

    def normal(self, size: Sequence[int]) -> Array:
        return Array([self._draw.gauss(0, 1) for _ in range(math.prod(size))], size)


random = SimpleNamespace(default_rng=_Generator, Generator=_Generator)
ndarray = Array
