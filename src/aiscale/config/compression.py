"""How gradients travel between the ranks of DDP."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from aiscale.config.errors import require

#: option -> the methods that have it; elsewhere it would be ignored, so it is refused
_OPTIONS = {
    "density": ("radius", "top-k", "random-k"),
    "warmup_steps": ("radius", "top-k", "random-k", "powersgd"),
    "interval": ("radius",),
    "turns": ("radius",),
    "moments": ("radius",),
    "range": ("radius",),
    "scope": ("radius", "top-k"),
    "score": ("radius",),
    "residual": ("radius", "top-k", "random-k"),
    "rank": ("powersgd",),
}


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """What DDP sends instead of whole gradients, in which precision, and when."""

    method: Literal["none", "radius", "top-k", "random-k", "powersgd"] = "none"
    wire: Literal["same", "bf16"] = "same"  #: precision of what is sent: the gradients' own, or bf16
    overlap: bool = True  #: send each bucket once it is full, during the backward pass; false: all of it at once, after
    density: float = 0.4  #: share of each tensor's entries that is sent, k = max(floor(density x numel), 1)
    warmup_steps: int = 0  #: dense steps before the first sparse one
    interval: int = 200  #: radius: every so many steps is dense and chooses the mask anew (T)
    #: radius: of the density a part goes to the entries that were not chosen, each in its turn, once in so many sparse
    #: steps; 0, as published: they wait for the next dense step
    turns: int = 0
    #: radius with turns: what AdamW does with an entry that a step does not send. decay, as published: takes its
    #: gradient for zero. wait: leaves it alone, and when its turn comes takes its mean gradient, and a step for each
    moments: Literal["decay", "wait"] = "decay"
    range: int = 0  #: radius: each chosen entry takes along its neighbours up to this distance (r)
    scope: Literal["tensor", "global"] = "tensor"  #: choose the largest entries of each tensor, or of all together
    score: Literal["update", "gradient", "momentum"] = "update"  #: radius: by whose magnitude entries are chosen
    #: unsent gradients, and with wire=bf16 what rounding took off those sent, come later: summed, averaged, never
    residual: Literal["sum", "mean", "none"] = "sum"
    rank: int = 4  #: powersgd: rank of the two factors that stand for a matrix

    def __post_init__(self) -> None:
        for name, methods in _OPTIONS.items():
            value, default = getattr(self, name), CompressionConfig.__dataclass_fields__[name].default
            require(
                value == default or self.method in methods,
                f"compression.{name} is {value}, but compression.method {self.method} has no such option: "
                f"set it to {default}, or method to {' or '.join(methods)}",
            )
        require(
            0 < self.density <= 1,
            f"compression.density is {self.density}: it is the share of entries that is sent, above 0 and at most 1: "
            "set it to 0.4, for example",
        )
        for name, least in (("interval", 1), ("rank", 1), ("range", 0), ("turns", 0), ("warmup_steps", 0)):
            value = getattr(self, name)
            require(value >= least, f"compression.{name} is {value}: it must be at least {least}: set that or more")
        require(
            self.turns or self.moments == "decay",
            "compression.moments is wait without turns: an entry that is not chosen would stand still until the next "
            "dense step: set compression.turns as well, or moments=decay",
        )
        if self.turns:
            least = math.ceil(1 / self.density)
            require(
                least <= self.turns <= 200,
                f"compression.turns is {self.turns} at density {self.density}: to send each entry once in so many "
                f"steps, it must be at least {least}, and at most 200: set turns or density accordingly, or turns=0",
            )
            require(
                self.scope == "tensor" and self.range == 0,
                f"compression.turns is {self.turns}: with scope {self.scope} and range {self.range} what turns would "
                "send is not defined: set scope=tensor and range=0, or turns=0",
            )
            require(
                self.residual == "sum",
                f"compression.turns is {self.turns} with residual {self.residual}: what goes in turn is a sum, which "
                "moments=wait divides by the number of its gradients: set residual=sum",
            )
            require(
                self.turns < self.interval,
                f"compression.turns is {self.turns} with interval {self.interval}: a dense step would come before the "
                "last turn: set interval above turns",
            )

    @property
    def is_default(self) -> bool:
        return self == CompressionConfig()


def forget_foreign_options(section: dict, chosen: set[str]) -> None:
    """Put the options that the section's method lacks back to their defaults, unless they are among `chosen`.

    So one override takes a recipe to another method: compression.method=none, without naming what radius had.
    """
    for name, methods in _OPTIONS.items():
        if section["method"] not in methods and name not in chosen:
            section[name] = CompressionConfig.__dataclass_fields__[name].default
