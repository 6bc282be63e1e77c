"""What simulated ranks share: the costs, the model's layers, messages on their way, and a record of all events."""

from __future__ import annotations

import linecache
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aiscale.lesson import LessonError
from aiscale.plan.cost import Event


class SimulationError(LessonError):
    """A program did what ranks cannot do; a notebook shows the one line."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


@dataclass(frozen=True, kw_only=True)
class Costs:
    forward_s: float = 1.0  #: of a layer and micro-batch; backward takes twice as long, each of its halves once
    update_s: float = 0.0  #: of a whole layer's parameters
    link_s_per_gb: float = 0.0
    saved_gb: float = 0.0  #: what a layer keeps for its backward pass
    border_gb: float = 0.0  #: a micro-batch between two layers
    lr: float = 0.5


@dataclass
class Message:
    source: int
    to: int
    start_s: float
    arrived_s: float


class Machine:
    """`size` ranks see this of each other; `World` runs their programs."""

    def __init__(self, size: int, costs: Costs, *, layers: int = 0, micro: int = 1, width: int = 4) -> None:
        self.size, self.costs, self.layers, self.micro, self.width = size, costs, layers, micro, width
        self.linear: set[int] = set()  #: layers without tanh
        self.owners = False  #: each rank has the optimizer states of its part of every layer only
        self.labels = "layer"  #: what is written into a pass: layer or micro
        self.events: list[Event] = []
        self.messages: list[Message] = []
        self.channels: dict[tuple[int, int], deque] = defaultdict(deque)
        self.collectives: dict[int, dict] = defaultdict(dict)

    def wait(self, index: int, ready: Callable[[], bool], what: str, for_ranks: list[int]) -> None:
        """Let the others go on until `ready`."""
        raise NotImplementedError

    def event(self, rank: int, name: str, start_s: float, end_s: float, kind: str) -> None:
        self.events.append(Event(rank, name, start_s, end_s, kind))

    def label(self, layer: int, micro: int) -> str:
        """What a picture writes into a pass; of several pieces on a rank also the piece's number."""
        if self.labels == "layer":
            return str(layer)
        return f"{micro}.{layer // self.size}" if self.layers > self.size else str(micro)

    def apply(self, layer: int, z: np.ndarray) -> np.ndarray:
        return z if layer in self.linear else np.tanh(z)

    def slope(self, layer: int, out: np.ndarray) -> np.ndarray:
        """The derivative of `apply`, from its output."""
        return np.ones_like(out) if layer in self.linear else 1 - out**2


def line_of_program() -> str:
    """The line of the participant's program that is running."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename != threading.__file__ and Path(frame.filename).parent != Path(__file__).parent:
            text = (linecache.getline(frame.filename, frame.lineno) or "").strip()
            return f"\n    line {frame.lineno}: {text}" if text else ""
    return ""
