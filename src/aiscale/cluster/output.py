"""What ranks print and draw, shown under the cell in rank order and labelled `[rank 0]`, `[rank 1]`, ...

ipyparallel shows output as it arrives, so the order differs from run to run. Here the text of all ranks is one display
that is updated in place while the cell runs, so it is live, in order, and stored in order. Where nothing can be updated
(a terminal), rank 0's text is printed as it comes and each later rank's once the ones before it are done.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

_REFRESH_S = 0.2
_CHARACTERS_PER_S = 200_000
_PLAIN = "text/plain"


class Board:
    """The output of one cell on `ranks`, whose messages ipyparallel collects in `children`."""

    def __init__(self, ranks: Sequence[int], children: Sequence) -> None:
        self.ranks, self._children = list(ranks), list(children)
        self._metadata = [child.output.metadata for child in children]
        self._width = len(str(max(self.ranks)))
        self._handle = None
        self._shown = ""
        self._printed = [0] * len(self.ranks)
        self._next_refresh = 0.0
        self._live = in_kernel()

    def refresh(self) -> None:
        """Show what has arrived since the last call; cheap enough for a waiting loop."""
        if time.monotonic() < self._next_refresh:
            return
        self._show()
        # The whole text is sent each time, so a long one is sent less often.
        self._next_refresh = time.monotonic() + _REFRESH_S + len(self._shown) / _CHARACTERS_PER_S

    def finish(self) -> None:
        """Show all text, then figures and other rich output, rank by rank."""
        self._show(everything=True)
        for rank, md in zip(self.ranks, self._metadata, strict=True):
            outputs = list(md["outputs"] or [])
            if _is_rich(md["execute_result"]):
                outputs.append(md["execute_result"])
            for output in outputs:
                self._show_rich(rank, output)

    def _show(self, everything: bool = False) -> None:
        if self._live:
            text = "\n".join(line for i in range(len(self.ranks)) for line in self._lines(i))
            if text != self._shown:
                self._shown = text
                self._update(text)
            return
        for i, child in enumerate(self._children):
            complete = everything or child.output.done()  # a rank's answer may be here before its last lines
            lines = self._lines(i, complete)
            print(*lines[self._printed[i] :], sep="\n", end="\n" if lines[self._printed[i] :] else "", flush=True)
            self._printed[i] = len(lines)
            if not complete:
                break

    def _update(self, text: str) -> None:
        from IPython.display import DisplayHandle

        if self._handle is None:
            self._handle = DisplayHandle()
            self._handle.display({_PLAIN: text}, raw=True)
        else:
            self._handle.update({_PLAIN: text}, raw=True)

    def _lines(self, i: int, complete: bool = True) -> list[str]:
        """Labelled lines of one rank; without `complete` a last line that may still grow is left out."""
        md = self._metadata[i]
        blocks = [md["stdout"] or "", md["stderr"] or ""]
        result = md["execute_result"]
        if result and not _is_rich(result):
            blocks.append(result["data"].get(_PLAIN, ""))
        text = "".join(block if block.endswith("\n") or not block else block + "\n" for block in blocks)
        if not complete:
            text = "".join((md["stdout"] or "").rpartition("\n")[:2])
        label = self._label(self.ranks[i])
        # A progress bar returns to the start of its line; what it wrote last is what counts.
        return [f"{label} {line.rstrip().rpartition(chr(13))[2]}".rstrip() for line in text.split("\n")[:-1]]

    def _label(self, rank: int) -> str:
        return f"[rank {rank}]" + " " * (self._width - len(str(rank)))

    def _show_rich(self, rank: int, output: dict) -> None:
        from IPython.display import display

        display({_PLAIN: self._label(rank)}, raw=True)
        display(output["data"], raw=True, metadata=output.get("metadata") or {})


def _is_rich(output: dict | None) -> bool:
    return bool(output) and set(output["data"]) != {_PLAIN}


def in_kernel() -> bool:
    """Whether displays can be updated: in Jupyter and papermill, not in a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None
