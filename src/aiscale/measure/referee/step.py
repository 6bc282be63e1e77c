"""One step of the three runs that are compared, and what rounding explains in it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch

from aiscale.measure.referee import samples
from aiscale.measure.referee.shards import Whole, relative, wholes
from aiscale.measure.referee.verdict import Verdict

#: A difference is explained by rounding up to this many times what errors of one rounding change,
FACTOR = 40.0
#: and always up to this: sums of other parts, in fp32 or less, and in fp64.
FLOOR, FLOOR_FP64 = 5e-6, 1e-12
#: A tensor that rounding changes by more is noise: the gradient of a key's bias, whose exact value
#: is 0.
ONLY_NOISE = 0.02


class Step:
    """A step on many ranks, on one, and on one with noise."""

    def __init__(
        self,
        number: int,
        many: list[dict],
        one: list[dict],
        noisy: list[dict],
        verdict: Verdict,
        resumed=False,
        dim_of_samples=0,
    ):
        self.dim_of_samples = dim_of_samples
        self.resumed = resumed  #: `many` has a restart, `one` is the same on the same ranks without
        self.number, self.many, self.one, self.noisy, self.verdict = (
            number,
            many,
            one,
            noisy,
            verdict,
        )
        self.choices: set[str] = set()  #: gradients in which rounding has turned a choice
        #: The gradients that agree, before they are clipped and as the optimizer uses them.
        self.right: dict[str, set[str]] = {"before_clip": set(), "grad": set()}
        self._wholes: dict = {}
        #: Such an optimizer may compute in fp32: DeepSpeed sums a norm's squares in it.
        self.has_hidden_tensors = any(trace["unseen"] for trace in many)

    @property
    def is_half_on_many_alone(self) -> bool:
        many, one = (
            any("half precision" in trace["notes"] for trace in traces)
            for traces in (self.many, self.one)
        )
        return many and not one

    def on_many(
        self, kind: str, step: int | None = None, reduce: str = "first"
    ) -> dict[str, Whole]:
        found = self._put_together("many", self.many, kind, step, reduce)
        alone, kept = self.on_one(kind, step), {}
        for name, whole in found.items():
            if name not in alone or whole.values.shape == alone[name].values.shape:
                kept[name] = whole
            else:  # a slice without a mark, that equals no slice of the whole
                shapes = f"{tuple(whole.values.shape)}, on one rank "
                shapes += f"{tuple(alone[name].values.shape)}"
                self.verdict.not_compared.append(f"{name}: its shape is {shapes}")
        return kept

    def on_one(self, kind: str, step: int | None = None) -> dict[str, Whole]:
        return self._put_together("one", self.one, kind, step, "first")

    def with_noise(self, kind: str, step: int | None = None) -> dict[str, Whole]:
        return self._put_together("noisy", self.noisy, kind, step, "first")

    def _put_together(self, which: str, traces, kind, step, reduce) -> dict[str, Whole]:
        number = self.number if step is None else step
        key = (which, kind, number, reduce)
        if key not in self._wholes:
            self._wholes[key] = wholes(traces, number, kind, reduce)
        return self._wholes[key]

    def records(self) -> list[dict]:
        return [trace["steps"][self.number] for trace in self.many]

    @property
    def alone(self) -> dict:
        return self.one[0]["steps"][self.number]

    @cached_property
    def calls(self) -> tuple[list, list, list]:
        """Of the many ranks, of one, and of one with noise."""
        return tuple(
            samples.calls_with_samples(each, self.number, self.dim_of_samples)
            for each in (self.many, self.one, self.noisy)
        )

    @cached_property
    def read(self) -> list:
        return samples.counts(self.calls[0])

    @cached_property
    def read_before(self) -> set[str]:
        """The samples of earlier steps."""
        found: set[str] = set()
        for number in range(self.number):
            calls = samples.calls_with_samples(self.many, number, self.dim_of_samples)
            for mine in samples.counts(calls):
                found |= set(mine)
        return found

    @cached_property
    def data_ranks(self) -> int:
        return max(1, samples.shares(self.read))

    def tolerance(self, noise: float, is_fp64: bool = False) -> float:
        is_exact = is_fp64 and not self.has_hidden_tensors
        return max(FLOOR_FP64 if is_exact else FLOOR, FACTOR * noise)

    def noise_of(self, kind: str, name: str, step: int | None = None) -> float:
        noisy = self.with_noise(kind, step)
        return (
            relative(noisy[name].values, self.on_one(kind, step)[name].values)
            if name in noisy
            else 0.0
        )


def named(names: Iterable[str], total: int) -> str:
    names = list(names)
    shown = ", ".join(names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{shown}{more} ({len(names)} of {total})"


def stacked(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([row.double() for row in rows])
