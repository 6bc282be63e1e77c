"""What graders in workshop/graders/ are written with: exercises, comparisons, refused answers.

    @exercise("03.1", "Unequal shares", "weighted", minutes=10, hints=["Which counts more?", "..."])
    def unequal_shares(weighted):    # the participant's function `weighted`
        parts, sizes = draw()        # newly drawn: torch, numpy and random are seeded anew
        expected = reference(parts, sizes)
        same(weighted(parts, sizes), expected, "the gradient", scale={4: "divide by the ranks"})

    unequal_shares.refuses("mean of parts", "3 sequences count", "return sum(parts) / len(parts)")

With `ranks=True` the function lives on the ranks: `weighted(x)` calls it with the same arguments on
each, `weighted.each(xs, ys)` with xs[r], ys[r] on rank r, both with a list of results in rank
order; `weighted.sent` says for each rank what it handed over, {"all_reduce": (calls, bytes)};
`weighted.on_ranks(f, x)` calls the grader's own f.
"""

from __future__ import annotations

import copy
import random
import re
import secrets
import signal
import textwrap
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aiscale.errors import ConfigError
from aiscale.lesson.cluster import RankError, Ranks
from aiscale.lesson.comparing import Wrong, compared, require, same, same_on_ranks
from aiscale.lesson.notebook import LessonError
from aiscale.lesson.progress import Shown

TIME_LIMIT_S = 30.0
_PX = "get_ipython().run_cell_magic('px'"  #: how IPython keeps a cell that begins with %%px
__all__ = ["Exercise", "Graded", "exercise", "require", "same", "same_on_ranks"]


class Empty(Exception):
    """There is no answer yet."""


@dataclass(frozen=True)
class Graded(Shown):
    state: str  #: right, wrong, empty, or unknown if a gap cannot be judged
    text: str  #: what the grader says of it


class Task:
    """What is graded: an exercise in a notebook, or a gap in a script (`gap_grader`)."""

    id: str
    title: str
    hints: Sequence[str]
    minutes: int


@dataclass(frozen=True)
class Exercise(Task):
    id: str
    title: str
    function: str  #: the name of what the participant writes
    grade: Callable
    hints: Sequence[str]
    minutes: int
    core: bool = True
    ranks: bool = False  #: the function lives on the ranks
    inplace: bool = False  #: a call returns the first argument as the function left it
    #: (name, part of what is said, source)
    refused: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def heading(self) -> str:
        """The heading of its section in the notebook."""
        kind = "core" if self.core else "extra"
        return f"## {self.id} · {self.title} ({kind}, {self.minutes} minutes)"

    def refuses(self, name: str, message: str, source: str) -> None:
        """Record a plausible wrong answer, which --check tries in the solution's place."""
        self.refused.append((name, message, textwrap.dedent(source).strip("\n")))

    def graded(
        self, namespace: Mapping, ranks: Ranks | None, *, limit_s: float = TIME_LIMIT_S
    ) -> Graded:
        """Grade what stands in a notebook's namespace, or on its ranks.

        Raises LessonError on a fault of the grader.
        """
        state, answer = "right", _Answer(self, namespace, ranks)
        compared.clear()
        try:
            with _seeded(secrets.randbelow(2**31)), _limited(limit_s):
                answer.find()
                self.grade(answer)
            text = f"right, in {len(compared)} comparisons with newly drawn inputs"
        except Empty as error:
            state, text = "empty", str(error)
        except Wrong as error:
            state, text = "wrong", str(error)
        except ConfigError:  # of the ranks, not of the answer
            raise
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            back = (
                f"what {self.function} gives back cannot be used ({type(error).__name__}: {error})"
            )
            state, text = "wrong", f"{back}: is it what its docstring says?"
        if state == "right" and not (answer.calls and compared):
            raise LessonError(
                f"the grader of {self.id} did not call {self.function}, or compared nothing"
            )
        return Graded(state, text)


def exercise(id: str, title: str, function: str, **about: Any) -> Callable[[Callable], Exercise]:
    """Make an exercise of a grader, which raises by `same` or `require`; about: other fields."""
    return lambda grade: Exercise(id, title, function, grade, **about)


class _Answer:
    """The participant's function, as graders call it."""

    def __init__(self, task: Exercise, namespace: Mapping, ranks: Ranks | None) -> None:
        self._task, self._namespace, self._ranks = task, namespace, ranks
        self.calls, self.sent = 0, []

    @property
    def size(self) -> int:
        return len(self._ranks)

    def find(self) -> None:
        name = self._task.function
        if not self._task.ranks:
            if not callable(self._namespace.get(name)):
                raise Empty(f"there is no function {name} here: run the cell above that defines it")
            return
        if self._ranks is None:
            raise Empty(
                "no ranks are running: "
                "run the set-up cell at the top, and the cells of this exercise"
            )
        # Without %%px a cell defines the function in the notebook alone, and the ranks may still
        # have an older one.
        # IPython keeps the text of a %%px cell as a literal
        defines = re.compile(rf"(^|\\n|['\"])def {name}\(", re.M)
        cells = [cell for cell in self._namespace.get("In", ()) if defines.search(cell)]
        if cells and not cells[-1].startswith(_PX):
            raise Empty(
                f"the cell that defines {name} ran in the notebook, not on the ranks: "
                "begin it with `%%px`"
            )
        if not all(self._ranks.run(_knows, name)):
            again = "run the set-up, then the cell above that defines it, which begins with `%%px`"
            raise Empty(f"there is no function {name} on the ranks: {again}")

    def __call__(self, *args: Any) -> Any:
        if self._task.ranks:
            return self.each(*[[arg] * self.size for arg in args])
        return self._here(args)

    def _here(self, args: Sequence) -> Any:
        self.calls += 1
        args = copy.deepcopy(args)  # it may change them
        try:
            result = self._namespace[self._task.function](*args)
        except Exception as error:
            frames = [
                f
                for f in traceback.extract_tb(error.__traceback__)[1:]
                if "ipython" in f.filename.lower()
            ]
            where = f", at `{frames[-1].line}`" if frames and frames[-1].line else ""
            self._failed(type(error).__name__, str(error), where)
        return args[0] if self._task.inplace else result

    def each(self, *args: Sequence) -> list:
        """Call it on every rank, on rank r with args[0][r], args[1][r], ...; results by rank."""
        self.calls += 1
        mine = [[arg[rank] for arg in args] for rank in range(self.size)]
        try:
            done = self._ranks.run(_call, self._task.function, mine, self._task.inplace)
        except RankError as error:
            # imports torch, which ranks have loaded
            from aiscale.measure.distributed.failing import tells_of_another_rank

            causes = [
                failure for failure in error.failures if not tells_of_another_rank(failure.message)
            ]
            if error.failures and not causes:
                raise Wrong(
                    "it hangs: some rank waits for one that never comes. "
                    "Which sends before it receives?"
                ) from None
            kind, message = (causes[0].name, causes[0].message) if causes else ("", str(error))
            self._failed(kind, message, "", str(error))
        self.sent = [sent for _, sent in done]
        return [result for result, _ in done]

    def on_ranks(self, function: Callable, *args: Any) -> list:
        """Call a function of the grader's on every rank; results in rank order.

        It imports what it needs itself.
        """
        sent = types.FunctionType(function.__code__, {}, function.__name__, function.__defaults__)
        sent.__module__ = "__main__"  # or the ranks would import the grader's file
        return self._ranks.run(sent, *args)

    def _failed(self, kind: str, message: str, where: str, all_ranks: str = "") -> None:
        if kind == "NotImplementedError" and self._task.id in message:
            line = f'raise NotImplementedError("{self._task.id}")'
            raise Empty(
                f"nothing written yet. Replace `{line}` in the cell above, "
                "run the cell, and check again"
            )
        raise Wrong(all_ranks or f"{self._task.function} raised {kind}: {message}{where}")


def _knows(name: str) -> bool:
    from IPython import get_ipython

    return callable(get_ipython().user_ns.get(name))


def _call(name: str, args_by_rank: Sequence, inplace: bool) -> tuple[object, dict]:
    """On a rank: the result of a call, and what the rank sent meanwhile."""
    from IPython import get_ipython

    names = get_ipython().user_ns
    args = args_by_rank[names["rank"]]
    before = names["world"].traffic.snapshot()
    result = names[name](*args)
    sent: dict[str, tuple[int, int]] = {}
    for (op, _), count in names["world"].traffic.since(before).items():
        calls, nbytes = sent.get(op, (0, 0))
        sent[op] = (calls + count.calls, nbytes + count.payload_bytes)
    return args[0] if inplace else result, sent


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """New random numbers for a grader; the notebook's own go on as if nothing had happened."""
    import torch

    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Refuse an answer that takes longer; the ranks can be used again."""
    rang = []

    def ring(*_: object) -> None:
        rang.append(True)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except KeyboardInterrupt:
        if not rang:
            raise
        raise Wrong(
            f"no answer after {seconds:g} s: it hangs. "
            "Does some rank wait for one that never comes?"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
