"""Runs a cell on ranks, `%%px` or `%%px --targets 0:2`: sends it, waits, and shows its output."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from ipyparallel import error
from ipyparallel.client.magics import ParallelMagics
from IPython import get_ipython
from IPython.display import DisplayHandle, display

from aiscale.lesson.cluster.errors import Failure, own_frames

OUTPUT_S = 30.0  #: for output to arrive after every rank has answered: it comes over another socket
_TICK_S = 0.05
_REFRESH_S = 0.2
_PLAIN = "text/plain"


class RankMagics(ParallelMagics):
    """ipyparallel's magics; `Ranks`, which watches the rank processes, waits for their cells."""

    def __init__(self, shell, ranks) -> None:
        self._ranks = ranks
        super().__init__(shell, view=self._every_rank())

    def _every_rank(self):
        """A view of its own: `--targets` changes it for one cell."""
        view = self._ranks.view.client.direct_view(list(range(self._ranks.size)))
        view.block = True
        return view

    def parallel_execute(self, cell, block=None, **_ignored):
        """Run source code on ranks. With `block` show its output, else return the AsyncResult."""
        targets = self.view.targets
        self._ranks._ready()
        self.view = self._every_rank()  # after a restart the client is another one
        self.view.targets = [targets] if isinstance(targets, int) else targets
        self.last_result = self.view.execute(cell, silent=False, block=False)
        if not (self.view.block if block is None else block):
            return self.last_result
        self._ranks._finish(self.last_result, show=True)


class Pending:
    """The answers of some ranks to one request."""

    def __init__(self, children: Mapping[int, Future]) -> None:
        self._children = dict(children)

    def ranks(self) -> list[int]:
        return [rank for rank, child in self._children.items() if not child.done()]

    def failures(self) -> list[Failure]:
        done = ((rank, child.result()) for rank, child in self._children.items() if child.done())
        return [failure for rank, result in done if (failure := _failure(rank, result))]

    def wait(
        self,
        timeout_s: float | None,
        on_tick: Callable[[], None] = lambda: None,
        *,
        until_failure: bool = False,
    ) -> bool:
        """Wait until all have answered, or one has failed; False if it times out.

        `on_tick` may raise.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while waiting := [child for child in self._children.values() if not child.done()]:
            wait(waiting, timeout=_TICK_S, return_when=FIRST_COMPLETED)
            on_tick()
            if until_failure and self.failures():
                return True
            if deadline is not None and time.monotonic() > deadline:
                return not self.ranks()
        on_tick()
        return True

    def await_output(self, is_in_vain: Callable[[], bool]) -> None:
        outputs = [child.output for child in self._children.values()]
        deadline = time.monotonic() + OUTPUT_S
        while (
            not is_in_vain()
            and wait(outputs, timeout=_TICK_S).not_done
            and time.monotonic() < deadline
        ):
            pass


def _failure(rank: int, result: object) -> Failure | None:
    if isinstance(result, error.RemoteError):
        # torch's begin with a position in its C++ source.
        message = re.sub(r"^\[/\S+:\d+\] ", "", result.evalue)
        return Failure(rank, result.ename, message, own_frames(result.traceback or ""))
    if isinstance(result, error.KernelError):  # aborted, or its engine is gone
        return Failure(rank, type(result).__name__, str(result), "")
    return None


class Output:
    """What one cell prints and draws on `ranks`; ipyparallel collects it in `children`.

    A terminal cannot update a display: there the text is printed when the cell has ended.
    """

    def __init__(self, ranks: Sequence[int], children: Sequence) -> None:
        self.ranks = list(ranks)
        self._metadata = [child.output.metadata for child in children]
        self._width = len(str(max(self.ranks)))
        self._display = InPlace()
        self._next_refresh = 0.0
        self._live = in_kernel()

    def refresh(self) -> None:
        if not self._live or time.monotonic() < self._next_refresh:
            return
        self._display.show(self._text())
        self._next_refresh = time.monotonic() + _REFRESH_S

    def finish(self) -> None:
        text = self._text()
        if self._live:
            self._display.show(text)
        elif text:
            print(text, flush=True)
        for rank, md in zip(self.ranks, self._metadata, strict=True):
            outputs = list(md["outputs"] or [])
            if _is_rich(md["execute_result"]):
                outputs.append(md["execute_result"])
            for output in outputs:
                display({_PLAIN: self._label(rank)}, raw=True)
                display(output["data"], raw=True, metadata=output.get("metadata") or {})

    def _text(self) -> str:
        lines = []
        for rank, md in zip(self.ranks, self._metadata, strict=True):
            blocks = [md["stdout"] or "", md["stderr"] or ""]
            result = md["execute_result"]
            if result and not _is_rich(result):
                blocks.append(result["data"].get(_PLAIN, ""))
            text = "".join(
                block if block.endswith("\n") or not block else block + "\n" for block in blocks
            )
            # A progress bar returns to the start of its line: show only its last state.
            shown = (line.rstrip().rpartition("\r")[2] for line in text.split("\n")[:-1])
            lines += [f"{self._label(rank)} {line}".rstrip() for line in shown]
        return "\n".join(lines)

    def _label(self, rank: int) -> str:
        return f"[rank {rank}]" + " " * (self._width - len(str(rank)))


def _is_rich(output: dict | None) -> bool:
    return bool(output) and set(output["data"]) != {_PLAIN}


class InPlace:
    def __init__(self) -> None:
        self.shown = ""
        self._handle: DisplayHandle | None = None

    def show(self, text: str) -> None:
        if text == self.shown:
            return
        self.shown, data = text, {_PLAIN: text}
        if not in_kernel():
            print(text, file=sys.stderr, flush=True)
        elif self._handle is None:
            self._handle = DisplayHandle()
            self._handle.display(data, raw=True)
        else:
            self._handle.update(data, raw=True)


def in_kernel() -> bool:
    """Whether displays can be updated: in Jupyter and papermill, not in a terminal."""
    return getattr(get_ipython(), "kernel", None) is not None
