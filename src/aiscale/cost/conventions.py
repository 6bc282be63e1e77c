"""How many bytes a parameter takes: the counts that papers, slides and libraries give, on one set of categories.

    for row in CONVENTIONS: print(row.name, row.total)      # 16, 18, 14, 12, ... bytes a parameter
    difference(find("ZeRO paper"), find("slide, AdamW"))    # {"gradients": 2.0}: why one says 16 and the other 18

Every one of them counts the same four things: weights in 32 bits (in mixed precision the master copy that the optimizer
updates), weights in 16 bits (what matrix products read), gradients, and the optimizer's moments. They differ in whether
gradients have 16 bits or 32, and in what the optimizer keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiscale.config import ConfigError

PARTS = ("weights_32bit", "weights_16bit", "gradients", "moments")


@dataclass(frozen=True, kw_only=True)
class Convention:
    """One way of counting, bytes a parameter."""

    name: str
    weights_32bit: float = 4
    weights_16bit: float = 2
    gradients: float = 4
    moments: float = 8  #: two of fp32 for Adam
    source: str

    @property
    def total(self) -> float:
        return sum(getattr(self, part) for part in PARTS)

    def zero_categories(self) -> dict[str, float]:
        """Sorted as the ZeRO paper does: 16-bit weights, gradients, and all that only the optimizer needs (its K)."""
        if not self.weights_16bit:
            return {"parameters": self.weights_32bit, "gradients": self.gradients, "optimizer states": self.moments}
        states = self.weights_32bit + self.moments
        return {"parameters": self.weights_16bit, "gradients": self.gradients, "optimizer states": states}


_SLIDE = 'slide "Memory Requirement During Training an LLM", AI for Science at Scale, part 2 (S. Dash, ORNL)'

CONVENTIONS = (
    Convention(
        name="ZeRO paper", gradients=2, source="Rajbhandari et al. 2020, section 3.1: 2 + 2 + K, K = 12 for Adam"
    ),
    Convention(
        name="ZeRO-2 estimator",
        gradients=6,
        source="deepspeed's estimate_zero2_model_states_mem_needs: 2 + 18, gradients in 16 bits and again in 32",
    ),
    Convention(
        name="ZeRO-3 estimator",
        source="deepspeed's estimate_zero3_model_states_mem_needs: 18 (it names no parts; those of the slide add up)",
    ),
    Convention(name="slide, AdamW", source=f"{_SLIDE}: 6 + 4 + 8"),
    Convention(name="slide, SGD with momentum", moments=4, source=f"{_SLIDE}: 6 + 4 + 4"),
    Convention(name="slide, 8-bit AdamW", moments=2, source=f"{_SLIDE}: 6 + 4 + 2"),
    Convention(name="slide, fp32 AdamW", weights_16bit=0, source=f"{_SLIDE}: 4 + 4 + 8"),
    Convention(
        name="Megatron-Core, bf16",
        source="Megatron-Core's distributed optimizer: bf16 weights, fp32 gradients: 6 + 12/d for d ranks, 18 for one",
    ),
    Convention(
        name="autocast, during a step",
        source="this package under bf16: fp32 weights and gradients, casts of the weights while a step runs",
    ),
    Convention(
        name="autocast, between steps", weights_16bit=0, source="this package under bf16 between steps: as in fp32"
    ),
    Convention(name="plain SGD, fp32", weights_16bit=0, moments=0, source="weights and gradients, nothing else"),
)


def find(name: str) -> Convention:
    """The convention of that name; raises ConfigError for another."""
    for convention in CONVENTIONS:
        if convention.name == name:
            return convention
    raise ConfigError(f"unknown convention {name!r}: it may be one of {', '.join(c.name for c in CONVENTIONS)}")


def difference(first: Convention, second: Convention) -> dict[str, float]:
    """What the second counts beyond the first, bytes a parameter by part; parts on which both agree are left out."""
    parts = {part: getattr(second, part) - getattr(first, part) for part in PARTS}
    return {part: nbytes for part, nbytes in parts.items() if nbytes}
