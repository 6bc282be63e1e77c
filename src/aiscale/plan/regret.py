"""What a choice of layouts costs: seconds of the chosen one over those of the best measured one.

    groups = published_groups()      # each: layouts of one model on the same devices, one batch
    of_choice(groups[0], groups[0].layouts[3])   # 1.0 is the best; 1.25 takes a quarter longer
    summary([of_choice(group, pick(group)) for group in groups])

An error in seconds says how far a number is off, regret says whether the decision was right.
`python benchmarks/planner/scoreboard.py` prints it for the planner's own choices; lesson 11 for
yours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aiscale.errors import ConfigError

#: A choice within a tenth of the best one counts as right. The tenth is ours: nanotron timed one
#: iteration, and its exact repeats differ by 25 to 400 %.
RIGHT = 1.1


@dataclass(frozen=True)
class Group:
    """Layouts of one model on the same devices with the same batch, all measured."""

    name: str
    layouts: tuple[str, ...]
    measured_s: tuple[float, ...]
    predicted_s: tuple[float, ...]  #: by constants that saw none of these runs

    @property
    def planned(self) -> str:
        """The layout that the planner takes: the fastest predicted one."""
        fastest = min(range(len(self.layouts)), key=self.predicted_s.__getitem__)
        return self.layouts[fastest]


def of_choice(group: Group, chosen: str) -> float:
    """Seconds of the chosen layout over those of the best; ConfigError if nobody measured it."""
    if chosen not in group.layouts:
        raise ConfigError(
            f"{chosen!r} was not measured for {group.name}: choose one of its "
            f"{len(group.layouts)} layouts, such as {group.layouts[0]!r}"
        )
    # A layout that was measured twice counts with its faster run.
    seconds = (s for name, s in zip(group.layouts, group.measured_s, strict=True) if name == chosen)
    return min(seconds) / min(group.measured_s)


def summary(regrets: Iterable[float]) -> dict[str, float]:
    """How many choices there were, how many were right, and the worst of them."""
    values = sorted(regrets)
    return {
        "groups": len(values),
        "right": sum(value <= RIGHT for value in values),
        "worst": values[-1],
    }


def published_groups(source: str = "nanotron_sweep") -> list[Group]:
    """The groups of one published table, from the stored scoreboard."""
    from aiscale.plan.published import measured

    rows = measured("planner")["choices"][source]
    names = ("layouts", "measured_s", "predicted_s")
    return [Group(row["name"], *(tuple(row[name]) for name in names)) for row in rows]
