"""`predict`: a participant commits to a guess, in place of None, before a cell measures the answer.

    guess = predict("bytes that a rank sends in a step", None, unit="bytes")    # 4 * 801_536, ...
    guess.against(sent_bytes, hints={2: "all-reduce sends in both its halves"})
    predict("the gradient on rank 1", None, choices=["the sum", "the mean"]).against("the mean")
    guess = predict("chunk sent", [[None, None], [None, None]], rows="rank", columns="step")
    guess.against([[0, 1], [1, 0]])

A key of `hints` is measured / guess, its text is what was probably missed. Seconds are never exact:
`within=2` counts a guess as held within a factor of 2. A cell that is run again replaces its
record, by name. `predict.card()` lists the predictions of a lesson.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

from aiscale.lesson import room
from aiscale.lesson.notebook import LessonError
from aiscale.lesson.progress import Shown, save, shell, show, show_table

MiB = 2**20
#: measured / guess: what was probably missed, for bytes and counts, and for bytes alone.
_COUNT_HINTS = {2: "Do both directions, or both halves, count?", 0.5: "Is something counted twice?"}
_BYTE_HINTS = {
    4: "A 32-bit number has 4 bytes",
    8: "A 64-bit number has 8 bytes",
    1 / 8: "Bytes or bits?",
}

Names = str | Sequence[str]  #: one word that is numbered, or a name for each

#: this process's predictions by name, in the order in which they were first made
_made: dict[str, Guess] = {}


@dataclass(frozen=True)
class Comparison(Shown):
    text: str
    grade: str | None = None  #: exact, close, near (a factor of 2) or off; None without a guess
    ratio: float | None = None  #: guess / measured, of numbers


class Guess(Shown):
    kind, form = "number", "a number"
    choices = rows = columns = ()

    def __init__(self, name: str, guess: object, unit: str = "", within: float = 1.1) -> None:
        self.name, self.unit, self.within = name, unit, within
        self.guess = None if guess is None else self.read(guess, "the guess")
        self.measured, self.verdict, self.source, self.hints = None, None, "measured", {}

    def against(
        self,
        measured: object,
        hints: Mapping[float, str] | None = None,
        *,
        source: str = "measured",
    ) -> Comparison:
        """Show the guess beside what was measured, and return the verdict.

        source: "computed" for a formula's value.
        """
        self.source, self.hints = source, hints or {}
        self.measured = self.read(measured, "what was measured")
        none = Comparison(f"{source} {self.say(self.measured)}, without a guess")
        self.verdict = none if self.guess is None else self.compare()
        facts = {"kind": self.kind}
        if self.kind != "grid":
            facts |= {"measured": self.measured, "unit": self.unit}
        show(f"{self.name}: {self.verdict.text}", self.verdict.grade, against=self.name, **facts)
        self.keep()
        if self.kind == "grid" and shell():
            from aiscale.measure import plots  # here, because matplotlib loads slowly

            plots.guessed(self.guess, self.measured, **self.titles, same=_same)
        return self.verdict

    def keep(self) -> None:
        labels = {"choices": self.choices, "rows": self.rows, "columns": self.columns}
        votes = {"guess": self.vote(self.guess), "truth": self.vote(self.measured)}
        room.post("guess", self.name, form=self.kind, unit=self.unit, **labels, **votes)
        if self.guess is not None:
            verdict = self.verdict or Comparison("")
            entry = {
                "kind": self.kind,
                "unit": self.unit,
                "guess": self.guess,
                "measured": self.measured,
            }
            save(
                "predictions", self.name, {**entry, "ratio": verdict.ratio, "grade": verdict.grade}
            )

    def vote(self, value: object) -> object:
        """A guess or what was measured, as the class's room counts it."""
        return value

    def opening(self) -> str:
        if self.guess is not None:
            return f"your guess is {self.say(self.guess)}"
        return f"no guess: write {self.form} in place of None and run the cell again"

    def read(self, value: object, what: str) -> object:
        """The value in the form that is compared and saved."""
        number = value.item() if getattr(value, "ndim", None) == 0 else value  # of numpy or torch
        if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number):
            raise LessonError(
                f"{self.name}: {what} is {value!r}, but it must be a number, as 3 or 1.5 * MiB"
            )
        return int(number) if isinstance(number, int) else float(number)

    def compare(self) -> Comparison:
        guess, measured = self.guess, self.measured
        line = f"guessed {self.say(guess)}, {self.source} {self.say(measured)}"
        if math.isclose(guess, measured, rel_tol=1e-9):
            return Comparison(f"{line}: exactly right", "exact", 1.0)
        if not measured or guess / measured <= 0:
            return Comparison(f"{line}: off", "off")
        ratio = guess / measured
        factor = max(ratio, 1 / ratio)
        grade = "close" if factor <= self.within else "near" if factor <= 2 else "off"
        hints = dict(self.hints)
        if self.unit == "bytes":
            hints = _COUNT_HINTS | _BYTE_HINTS | hints
        elif isinstance(measured, int) and self.unit not in ("s", "%", "times"):
            hints = _COUNT_HINTS | hints
        hint = next((text for key, text in hints.items() if abs(1 / ratio / key - 1) <= 0.02), "")
        what = (
            f"within a factor of {self.within:g}"
            if grade == "close"
            else f"off by a factor of {factor:.3g}"
        )
        what += f". {hint[0].upper()}{hint[1:]}" if hint else ""
        return Comparison(f"{line}, guess / {self.source} = {ratio:.3g}: {what}", grade, ratio)

    def say(self, value: object) -> str:
        # here, because matplotlib loads slowly
        from aiscale.measure.plots.style import format_bytes, format_seconds

        if self.unit == "bytes":
            return format_bytes(value) + (f" ({value:,.0f} bytes)" if abs(value) >= 1024 else "")
        if self.unit == "s":
            return format_seconds(value)
        whole = isinstance(value, int) or abs(value) >= 1e4
        return f"{value:,.{0 if whole else 4}{'f' if whole else 'g'}} {self.unit}".rstrip()


class Choice(Guess):
    kind, form = "choice", "the number of a choice"

    def __init__(self, name: str, guess: object, choices: Sequence[str]) -> None:
        self.choices = list(choices)
        super().__init__(name, guess)

    def opening(self) -> str:
        return super().opening() + "".join(
            f"\n  {i}  {choice}" for i, choice in enumerate(self.choices, 1)
        )

    def read(self, value: object, what: str) -> str:
        for number, choice in enumerate(self.choices, 1):
            if (
                value == number
                or isinstance(value, str)
                and value.strip().lower() == choice.lower()
            ):
                return choice
        texts = ", ".join(map(repr, self.choices))
        raise LessonError(
            f"{self.name}: {what} is {value!r}, "
            f"but it must be the number or the text of one of {texts}"
        )

    def vote(self, value: object) -> object:
        return None if value is None else self.choices.index(value)

    def compare(self) -> Comparison:
        if self.guess == self.measured:
            return Comparison(f"{self.guess}: right", "exact")
        return Comparison(f"guessed {self.guess}: wrong, it is {self.measured}", "off")

    def say(self, value: object) -> str:
        return str(value)


class GridGuess(Guess):
    kind, form = "grid", "what you expect in each cell"

    def __init__(self, name: str, guess: Sequence, rows: Names, columns: Names) -> None:
        self.shape = [len(row) for row in guess]
        self.rows, self.columns = _names(rows, len(guess)), _names(columns, max(self.shape))
        self.titles = {"rows": rows, "columns": columns}
        super().__init__(
            name, guess if any(_plain(cell) is not None for row in guess for cell in row) else None
        )

    def read(self, value: object, what: str) -> list[list]:
        cells = [list(row) for row in value]
        if [len(row) for row in cells] != self.shape:
            raise LessonError(f"{self.name}: {what} must have rows of {self.shape} cells")
        return cells

    def vote(self, value: object) -> object:
        if value is None:
            return None
        width = len(self.columns)
        padded = [(list(row) + [None] * width)[:width] for row in value]
        return [_vote(cell) for row in padded for cell in row]

    def compare(self) -> Comparison:
        pairs = [zip(*rows, strict=True) for rows in zip(self.guess, self.measured, strict=True)]
        wrong = [
            (r, c)
            for r, row in enumerate(pairs)
            for c, (mine, truth) in enumerate(row)
            if not _same(mine, truth)
        ]
        total = sum(self.shape)
        if not wrong:
            return Comparison(f"all {total} cells right", "exact")
        where = ", ".join(f"{self.rows[r]} {self.columns[c]}" for r, c in wrong[:4])
        where += ", ..." if wrong[4:] else ""
        grade = "near" if 2 * len(wrong) <= total else "off"
        return Comparison(f"{total - len(wrong)} of {total} cells right; wrong: {where}", grade)

    def say(self, value: object) -> str:
        return f"{sum(self.shape)} cells"


def predict(
    name: str,
    guess: object = None,
    *,
    unit: str = "",
    within: float = 1.1,
    choices: Sequence[str] | None = None,
    rows: Names = "row",
    columns: Names = "column",
) -> Guess:
    """Ask for a guess of a number, one of `choices`, or a grid (a list of rows); None: no guess."""
    if choices is not None:
        made = Choice(name, guess, choices)
    elif isinstance(guess, list | tuple):
        made = GridGuess(name, guess, rows, columns)
    else:
        made = Guess(name, guess, unit, within)
    _made[name] = made
    show(f"{name}: {made.opening()}", None, predict=name)
    made.keep()
    return made


def card() -> None:
    """Show each prediction of this notebook with guess, answer (measured or computed) and ratio."""
    compared = [made for made in _made.values() if made.verdict]
    right = sum(made.verdict.grade in ("exact", "close") for made in compared)
    table = [("prediction", "guess", "answer", "guess / answer", "")]
    for made in compared:
        guess = "" if made.guess is None else made.say(made.guess)
        ratio = "" if made.verdict.ratio is None else f"{made.verdict.ratio:.3g}"
        table.append((made.name, guess, made.say(made.measured), ratio, made.verdict.grade or ""))
    show_table(f"{right} of {len(compared)} right or close", table)


predict.card = card


def _names(names: Names, count: int) -> list[str]:
    """The names of a grid's rows or columns: as given, or "rank 0", "rank 1" from "rank"."""
    return [f"{names} {i}" for i in range(count)] if isinstance(names, str) else list(names)


def _plain(cell: object) -> object:
    return (cell.strip().lower() or None) if isinstance(cell, str) else cell


def _vote(cell: object) -> str:
    """A cell as text: equal for cells that are the same."""
    number = isinstance(cell, Real) and not isinstance(cell, bool)
    return f"{cell:g}" if number else str(_plain(cell) or "")


def _same(guess: object, truth: object) -> bool:
    return _plain(guess) == _plain(truth)
