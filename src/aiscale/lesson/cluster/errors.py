"""The errors of ranks: they name the rank and show its traceback, without ipyparallel's frames."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aiscale.errors import ConfigError

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_MACHINERY = re.compile(r"File (\S*[/\\]ipyparallel[/\\]|<string>:1\b)")


class ClusterError(ConfigError):
    """A cluster cannot be started or used; the message says what to change."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


@dataclass(frozen=True)
class Failure:
    rank: int
    name: str  #: of the exception
    message: str
    traceback: str  #: as the rank printed it


class RankError(RuntimeError):
    """A cell or a call failed on a rank. The message names rank and error; `shown`: tracebacks."""

    def __init__(self, message: str, shown: str = "", failures: Sequence[Failure] = ()) -> None:
        super().__init__(message)
        self.shown = shown
        self.failures = list(failures)  #: what each rank raised, in rank order
        if shown:
            # For plain Python; IPython calls _render_traceback_.
            self.add_note(_COLOR.sub("", shown))

    @classmethod
    def of(cls, failures: Sequence[Failure], note: str = "") -> RankError:
        """One error for what several ranks raised; equal errors are shown once."""
        groups: dict[tuple[str, str], list[Failure]] = {}
        for failure in failures:
            groups.setdefault((failure.name, failure.message), []).append(failure)
        heads, shown = [], []
        for group in groups.values():
            who, first = name_ranks(failure.rank for failure in group), group[0]
            heads.append(f"{who} raised {first.name}: {first.message}")
            shown += [f"[{who}]", first.traceback.rstrip() or f"{first.name}: {first.message}", ""]
        return cls("; ".join(heads) + (f" ({note})" if note else ""), "\n".join(shown), failures)

    def _render_traceback_(self) -> list[str]:
        return [*self.shown.splitlines(), *([""] if self.shown else []), str(self)]


class RankDied(RankError):
    """A rank's process died; `shown` is the end of its log."""


class RanksInterrupted(KeyboardInterrupt):
    """The cell was stopped; the message says what happened to the ranks."""

    def _render_traceback_(self) -> list[str]:
        return [f"stopped: {self}"]


def own_frames(traceback: str) -> str:
    """A rank's traceback without ipyparallel's frames."""
    frames = []
    # Colour codes may stand before the word.
    for frame in re.split(r"(?<=\n)(?=\S*File )", traceback):
        foreign = _MACHINERY.match(_COLOR.sub("", frame))
        frames.append(frame.partition("\n\n")[2] if foreign else frame)
    return "".join(frames)


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 0-3` or `ranks 0, 2-3`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {text}" if len(spans) == 1 and spans[0][0] == spans[0][1] else f"ranks {text}"
