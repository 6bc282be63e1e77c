"""What the referee says: the first place where two runs part, why, and what was not compared."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace

EQUAL, PARTS, CANNOT_TELL = 0, 1, 2  #: exit statuses


@dataclass(frozen=True)
class Cause:
    words: str
    remedy: str = ""
    lesson: str = ""  #: the notebook that explains it, such as "03_ddp"
    #: Whether another number of micro-batches on one rank would tell which of two reasons it has.
    is_open: bool = False


@dataclass(frozen=True)
class Part:
    """A place where the ranks do something else than one rank does."""

    step: int
    what: str
    where: str
    cause: Cause
    size: float | None = None  #: relative difference
    tolerance: float | None = None
    ranks: str = ""
    #: The runs were given different things: what follows from it tells nothing.
    is_input: bool = False

    def __str__(self) -> str:
        lines = [f"step {self.step}, {self.what}: {self.where}"]
        if self.size is not None:
            lines.append(f"  difference {self.size:.1e}, rounding explains {self.tolerance:.1e}")
        if self.ranks:
            lines.append(f"  where: {self.ranks}")
        lines.append(f"  cause: {self.cause.words}")
        if self.cause.remedy:
            lines.append(f"  remedy: {self.cause.remedy}")
        if self.cause.lesson:
            lines.append(f"  lesson: {self.cause.lesson}")
        return "\n".join(lines)


@dataclass
class Verdict:
    ranks: int
    steps: int = 0  #: compared to their end
    first: Part | None = None
    then: list[Part] = field(default_factory=list)  #: what follows from it
    given: list[Part] = field(default_factory=list)  #: differences of inputs that were taken away
    warnings: list[str] = field(default_factory=list)  #: no error of value, and yet hardly intended
    compared: Counter = field(default_factory=Counter)
    not_compared: list[str] = field(default_factory=list)
    only_noise: list[str] = field(default_factory=list)  #: weights whose gradient is no more
    unknown: str = ""  #: why there is no verdict
    seconds: float = 0.0
    is_of_restart: bool = False  #: a run with a stop in it against the run in one go

    @property
    def status(self) -> int:
        if self.first and not self.unknown:
            return PARTS
        return CANNOT_TELL if self.unknown else EQUAL

    def to_dict(self) -> dict:
        plain = replace(self, compared=dict(self.compared))
        return asdict(plain) | {"status": self.status}

    def __str__(self) -> str:
        lines = [self._headline()]
        if self.first:
            lines += [str(self.first)]
        if self.then:
            lines.append(
                "then: " + "; ".join(f"{part.what} of step {part.step}" for part in self.then)
            )
        for part in self.given:
            lines.append(f"input, taken away to compare the rest: {part}")
        lines += [f"warning: {warning}" for warning in self.warnings]
        counted = ", ".join(f"{count} {what}" for what, count in self.compared.items())
        lines.append(f"compared over {self.steps} steps: {counted or 'nothing'}")
        lines += [f"not compared: {words}" for words in dict.fromkeys(self.not_compared)]
        if self.only_noise:
            names = ", ".join(list(dict.fromkeys(self.only_noise))[:4])
            lines.append(f"not compared: gradients that are only rounding noise, such as {names}")
        return "\n".join(lines)

    def _headline(self) -> str:
        if self.unknown:
            return f"CANNOT TELL: {self.unknown}"
        other = "the run without a stop" if self.is_of_restart else "one rank"
        if self.first:
            return f"PARTS from {other}, in {self.seconds:.0f} s:"
        many = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        where = f"on {many} and on one"
        if self.is_of_restart:
            where = f"with and without a stop, {many} after it"
        after = ", from equal inputs on" if self.given else ""
        return f"EQUAL within rounding {where}{after}, in {self.seconds:.0f} s"
