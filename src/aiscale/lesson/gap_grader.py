"""A gap of a script, graded by running the script: the referee holds it against another script.

    wrapped = Gap("05.a", "What is wrapped", "train_fsdp.py", hints=[...], solution="...")
    wrapped.refuses("the root alone", "one all-gather", "fully_shard(model)")

    @wrapped.demand
    def gathers(tried):          # asked of a script whose numbers are right
        require(tried.traffic["all_gather"] > 0, "nothing is gathered")

    @wrapped.demand_with("--bf16")
    def halves(tried):           # the same script once more, with these arguments
        require(tried.traffic["all_gather"] < 1e6, "fp32 is gathered")

    wrapped.prints_as_ours("--bf16", 4, {2: "what does step 1 send?"})

The learner's folder is copied, and gaps that are not filled get the kit's lines in the copy.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiscale.lesson import gaps
from aiscale.lesson.comparing import Wrong, require
from aiscale.lesson.grading import Graded, Task
from aiscale.lesson.notebook import LessonError
from aiscale.lesson.workbooks import find, workshop
from aiscale.lesson.written import places, write
from aiscale.processes import give_back_memory

_LOSS = re.compile(r"^step (\d+) loss (\S+)", re.MULTILINE)
TOLERANCE = 2e-5  #: of a printed loss: sums of other parts round otherwise
STORED = ".reference"  #: in the learner's folder: runs of the scripts that others are held against


@dataclass(frozen=True)
class Gap(Task):
    id: str
    title: str
    script: str  #: the file in which the gap is
    hints: Sequence[str]
    solution: str
    minutes: int = 10
    runs: str = ""  #: the kit's script that is started, if it is another one
    ranks: int = 2
    arguments: str = ""  #: besides --save
    saves: bool = True  #: the script takes --save
    against: str = "train.py"  #: the script that is right, on one rank; the learner's own
    against_arguments: str = ""
    against_ours: bool = False  #: hold it against workshop/your_own's, not the learner's
    steps: int = 2
    limit_s: float = 60.0
    #: A part of a verdict or of an error with which a script stops, and what it means here.
    explained: Mapping[str, str] = field(default_factory=dict)
    said: str = ""  #: if its looks agree; the referee is not asked
    looks: list[Callable] = field(default_factory=list)  #: they `require`
    #: (further arguments of the script, those of a run before it, a function that `require`s)
    demands: list[tuple[str, str, Callable]] = field(default_factory=list)
    #: (further arguments, steps, what to say by the first step whose loss is not that of ours)
    comparisons: list[tuple[str, int, Mapping[int, str]]] = field(default_factory=list)
    #: (name, part of what is said, source)
    refused: list[tuple[str, str, str]] = field(default_factory=list)

    def refuses(self, name: str, message: str, source: str) -> None:
        """Record a plausible wrong filling, which a test tries in the solution's place."""
        self.refused.append((name, message, _lines(source)))

    def demand(self, of: Callable) -> Callable:
        """Add a demand on what was tried (`referee.stored.Tried`)."""
        return self.demand_with("")(of)

    def demand_with(self, arguments: str, after: str = "") -> Callable:
        """Add a demand on one more run, whose numbers are compared with nothing.

        `after`: arguments of a run before it, whose checkpoint it finds.
        """

        def added(of: Callable) -> Callable:
            self.demands.append((arguments, after, of))
            return of

        return added

    def prints_as_ours(self, arguments: str, steps: int, causes: Mapping[int, str]) -> None:
        """Compare its losses and bytes with those of workshop/your_own's, on as many ranks."""
        self.comparisons.append((arguments, steps, causes))

    def look(self, of: Callable) -> Callable:
        """Add a look at the folder of a try, before the referee's.

        RuntimeError: it cannot tell."""
        self.looks.append(of)
        return of

    @property
    def lines(self) -> str:
        return _lines(self.solution)

    def graded(self, namespace: Mapping | None = None, ranks: object = None) -> Graded:
        """Grade what stands in the learner's script; an empty gap gets the kit's lines.

        Raises LessonError if the script has not been written.
        """
        path = places.get(self.id)
        if path is None or not path.exists() or self.id not in gaps.gaps_in(path.read_text()):
            raise LessonError(f"{self.id}: run the cell that writes {self.script}, then this one")
        text, fillings = gaps.collapsed(path.read_text())
        filling = fillings.get(self.id)
        if filling is None or filling.by_kit:
            fillings[self.id] = gaps.Filling(self.lines, by_kit=True)
            write(path, gaps.expanded(text, fillings))
            return Graded(
                "empty",
                f"nothing written yet. {self.script} has the kit's lines there, so that what "
                "follows runs, until you write yours in the cell above; "
                f'check("{self.id}", hint=1) shows a hint',
            )
        verdict = self.tried(path)
        give_back_memory()  # the next cell may start ranks
        return verdict

    def tried(self, path: Path) -> Graded:
        """Grade the file `path`, in which this gap is filled."""
        with tempfile.TemporaryDirectory(prefix="aiscale-gap-") as folder:
            copy = _copy_for_a_try(path, Path(folder))
            if self.runs:
                shutil.copyfile(workshop() / "your_own" / self.runs, copy / self.runs)
            try:
                for look in self.looks:
                    look(copy)
            except Wrong as error:
                return Graded("wrong", str(error))
            except RuntimeError as error:
                return _cannot_tell(error)
            if self.said:
                return Graded("right", f"right: {self.said}")
            return self._graded_by_running(copy, path.parent / STORED)

    def _graded_by_running(self, folder: Path, stored: Path) -> Graded:
        # imports torch
        from aiscale.measure.referee.question import Question
        from aiscale.measure.referee.stored import run_kept, run_once, try_again

        save = ("--save", "{TMP}/checkpoint")
        known = workshop() / "your_own" if self.against_ours else folder
        question = Question(
            folder / (self.runs or self.script),
            (*(save if self.saves else ()), *self.arguments.split()),
            self.ranks,
            self.steps,
            self.limit_s,
            against=(known / self.against, (*save, *self.against_arguments.split())),
        )
        try:
            tried = try_again(question, stored)
        except RuntimeError as error:
            return _cannot_tell(error)

        def with_more(arguments: str, after: str) -> Any:
            if not arguments:
                return tried
            again = run_once(question, tuple(arguments.split()), tuple(after.split()))
            return replace(again, expected=tried.expected)

        found = self._verdict(tried, with_more)
        for arguments, steps, causes in self.comparisons if found.state == "right" else ():
            theirs = replace(question, steps=steps, arguments=save)
            ours = replace(theirs, script=workshop() / "your_own" / theirs.script.name)
            more = tuple(arguments.split())
            try:
                _compare(run_once(theirs, more), run_kept(ours, more, stored), causes)
            except Wrong as error:
                told = f"right with {self.arguments}. With {arguments}, {error}"
                return Graded("wrong", self._meant(told))
            except RuntimeError as error:
                return _cannot_tell(error)
        return found

    def _verdict(self, tried: Any, with_more: Callable) -> Graded:
        verdict = tried.verdict
        follow = ("stopped at ", "its time was up", "gloo")  # from what another rank did
        if own := [words for words in tried.complaints if not any(w in words for w in follow)]:
            return Graded("wrong", self._stopped(own))
        if verdict.first and not verdict.unknown:
            return Graded("wrong", self._meant(_told(verdict.first)))
        if tried.complaints:
            return Graded("wrong", self._stopped(tried.complaints))
        if not verdict.unknown and verdict.warnings:
            return Graded("wrong", f"its numbers are right, but {verdict.warnings[0]}")
        try:
            for arguments, after, demand in self.demands:
                if arguments and verdict.unknown:
                    continue  # one more run of what is not known to be right
                again = with_more(arguments, after)
                stopped = f"with {arguments}: {self._stops(again.complaints)}"
                require(not again.complaints, stopped)
                demand(again)
            if not verdict.unknown:
                told = "step {step} prints the loss {found}, where {right} is the mean"
                _require_losses(tried.printed, tried.expected, told, {})
        except Wrong as error:
            right = "" if verdict.unknown else "its numbers are right, but "
            return Graded("wrong", self._meant(f"{right}{error}"))
        # The reference is right, so to do nothing, or with other samples than its own, is wrong.
        if tried.omitted:
            return Graded("wrong", self._meant(tried.omitted))
        if verdict.first and verdict.first.what == "samples":
            return Graded("wrong", self._meant(_told(verdict.first)))
        if verdict.unknown:
            return _cannot_tell(verdict.unknown)
        counted = verdict.compared["gradients"] or verdict.compared["updates"]
        what = "gradients" if verdict.compared["gradients"] else "updates of tensors"
        whose = "the kit's " if self.against_ours else ""
        ranks = f"{self.ranks} ranks" if self.ranks > 1 else "one rank"
        return Graded(
            "right",
            f"right: over {verdict.steps} steps on {ranks}, {counted} {what} are those of "
            f"{whose}{self.against} on one, within rounding",
        )

    def _stopped(self, complaints: Sequence[str]) -> str:
        return self._meant(self._stops(complaints))

    def _stops(self, complaints: Sequence[str]) -> str:
        return f"{self.script} stopped: {'; '.join(complaints[:2])}"

    def _meant(self, told: str) -> str:
        known = [words for part, words in self.explained.items() if part in told]
        return f"{told.rstrip('.')}. Here: {known[0]}" if known else told


def _cannot_tell(why: object) -> Graded:
    return Graded("unknown", f"the referee cannot tell: {why}. Go on with your lines")


def _require_losses(found: str, expected: str, told: str, causes: Mapping[int, str]) -> None:
    """Of what was printed. `told`: a loss that is not the expected one, from its {step}, {found},
    {right} and {cause}; `causes`: that of a step."""
    losses = dict(_LOSS.findall(found))
    for step, right in _LOSS.findall(expected):
        require(step in losses, f"no rank prints the loss of step {step}")
        close = abs(float(losses[step]) - float(right)) < TOLERANCE
        cause = causes.get(int(step), "the steps before it have gone another way")
        require(close, told.format(step=step, found=losses[step], right=right, cause=cause))


def _compare(theirs: Any, ours: Any, causes: Mapping[int, str]) -> None:
    require(not theirs.complaints, f"it stopped: {'; '.join(theirs.complaints[:2])}")
    mine, enough = (sum(tried.traffic.values()) for tried in (theirs, ours))
    told = f"a rank hands over {mine:,.0f} bytes in a step, where {enough:,.0f} are enough"
    require(mine < 1.02 * enough, told)
    told = f"ranks have different weights after step {theirs.apart}: they must apply one gradient"
    require(theirs.apart is None, told)
    told = "the loss of step {step} is {found}, not {right}: {cause}"
    _require_losses(theirs.printed, ours.printed, told, causes)


def _told(part: Any) -> str:
    where = f"{part.where}{f' ({part.ranks})' if part.ranks else ''}"
    words = part.cause.words
    words = words if words.endswith("?") else f"{words}."
    told = f"step {part.step}, {part.what}: {where}. Cause: {words}"
    # A remedy with a {name} is one of the command's arguments.
    has_remedy = part.cause.remedy and "{" not in part.cause.remedy
    return f"{told} Remedy: {part.cause.remedy}." if has_remedy else told


def _copy_for_a_try(path: Path, folder: Path) -> Path:
    """The learner's scripts beside the kit's helpers, with no gap left empty."""
    # The learner's files come last, over the kit's.
    for source in (workshop() / "your_own", path.parent):
        for each in sorted(source.glob("*.py")) + sorted(source.glob("*.json")):
            shutil.copyfile(each, folder / each.name)
    for each in folder.glob("*.py"):
        text, fillings = gaps.collapsed(each.read_text())
        empty = [id for id in gaps.gaps_in(text) if id not in fillings]
        for id in empty:
            fillings[id] = gaps.Filling(find(id)[1].lines)
        if empty:
            each.write_text(gaps.expanded(text, fillings))
    return folder


def _lines(source: str) -> str:
    return textwrap.dedent(source).strip("\n")
