"""`%px`, `%%px`, `%autopx` and `%pxresult` for the ranks of `cluster.start`: ipyparallel's flags, our order and errors.

%%px                       every rank
%%px --targets 0:2         ranks 0 and 1
%%px --local               the ranks, and then this kernel as well
%%px --noblock             returns at once; %pxresult waits and shows
"""

from __future__ import annotations

from ipyparallel.client.magics import NO_LAST_RESULT, ParallelMagics, exec_args, output_args
from IPython.core import magic_arguments
from IPython.core.error import UsageError


class RankMagics(ParallelMagics):
    """ipyparallel's magics, sent through `Ranks`, which watches the processes and shows output in rank order."""

    def __init__(self, shell, ranks) -> None:
        self._ranks = ranks
        super().__init__(shell, view=ranks.view)

    def parallel_execute(self, cell, block=None, save_name=None, targets=None, **_ignored):
        """Run source code on ranks; with `block` show its output, without return the AsyncResult."""
        self._ranks._ready()
        self.view = self._ranks.view  # another one after a restart
        view = self.view if targets is None else self.view.client.direct_view(targets)
        block = self.view.block if block is None else block
        asked = view.execute(cell, silent=False, block=False)
        self.last_result = asked
        if save_name:
            self.shell.user_ns[save_name] = asked
        if not block:
            return asked
        self._ranks._finish(asked, show=True)

    @magic_arguments.magic_arguments()
    @exec_args
    @output_args
    @magic_arguments.argument("--local", action="store_true", help="also execute the cell in this kernel")
    def cell_px(self, line="", cell=None):
        """Execute the cell on every rank."""
        args = magic_arguments.parse_argstring(self.cell_px, line)
        block = self.view.block if args.block is None else args.block
        asked = self.parallel_execute(
            cell,
            block=block and not args.local,
            save_name=args.save_name,
            targets=self._targets(args.targets),
        )
        if args.local:
            self.shell.run_cell(cell)
            if block:
                self._ranks._finish(asked, show=True)
        return None if block else asked

    @magic_arguments.magic_arguments()
    @output_args
    def result(self, line=""):
        """Wait for the last `%%px --noblock` and show its output."""
        args = magic_arguments.parse_argstring(self.result, line)
        if self.last_result is None:
            raise UsageError(NO_LAST_RESULT)
        if args.save_name:
            self.shell.user_ns[args.save_name] = self.last_result
            return
        self._ranks._finish(self.last_result, show=True)

    def _targets(self, text: str | None) -> list[int] | None:
        """Ranks from `2`, `0,2`, `[0, 2]`, `1:3`, `::2` or `all`."""
        if text is None:
            return None
        try:
            picked: list[int] = []
            every = list(range(self._ranks.size))
            for part in text.strip("[]() ").split(","):
                bounds = [int(bound) if bound.strip() else None for bound in part.split(":")]
                picked += every[slice(*bounds)] if len(bounds) > 1 else [every[bounds[0]]]
            return picked
        except (ValueError, IndexError):
            if text.strip() == "all":
                return None
            last = self._ranks.size - 1
            raise UsageError(f"--targets {text}: name ranks between 0 and {last}, as 2, 0,2 or 0:2") from None
