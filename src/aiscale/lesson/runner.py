"""`aiscale notebooks`: run the lessons headless, by papermill.

Plain papermill works too, but its error does not hold those of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aiscale.errors import hint
from aiscale.lesson.notebook import OPTIONAL, LessonError, Notebook, notebooks, read, tags

CELL_TIMEOUT_S = 300  # twice what a cell takes on a slow machine with others at work


@dataclass(frozen=True)
class Execution:
    name: str
    seconds: float
    executed: str  #: the copy with outputs
    error: str = ""  #: what the failing cell showed, errors of ranks included


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "names",
        nargs="*",
        metavar="NAME",
        help="a notebook's name, number or path (default: all, in reading order)",
    )
    add("--list", action="store_true", help="list them: title, minutes, what they need")
    add(
        "-p",
        "--parameter",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="set a parameter of the notebooks",
    )
    add(
        "--core",
        action="store_true",
        help="the lessons' core path: no optional cells, no appendices",
    )
    add(
        "--solved",
        action="store_true",
        help="with the kit's lines in gaps and exercises, so that each is graded",
    )
    add(
        "--out",
        default="build",
        metavar="DIR",
        help="executed copies go to DIR/notebooks (default: build)",
    )


def run(args: argparse.Namespace) -> int:
    selection = notebooks(args.names)
    if args.core and not args.names:
        selection = [notebook for notebook in selection if not notebook.is_appendix]
    if args.list:
        for notebook in selection:
            header = notebook.header
            print(f"{notebook.name}: {header.title}")
            about = f"{header.minutes} min, ranks: {header.ranks}, {header.hardware}"
            print(f"    {about}; comes before: {header.needs}")
        return 0
    results = execute(
        selection, _parameters(args.parameter), args.out, args.core, solved=args.solved
    )
    failed = [result for result in results if result.error]
    for result in failed:
        print(
            f"\n{result.name} failed after {result.seconds:.0f} s\n{result.error}", file=sys.stderr
        )
    passed, seconds = len(results) - len(failed), sum(result.seconds for result in results)
    print(f"{passed} of {len(results)} notebooks passed in {seconds:.0f} s")
    return int(bool(failed))


def _parameters(assignments: Sequence[str]) -> dict[str, object]:
    values = {}
    for assignment in assignments:
        name, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals or not name:
            raise LessonError(
                f"-p {assignment!r} is not of the form key=value: write, for example, -p n_steps=20"
            )
        values[name] = value
        with suppress(ValueError):
            values[name] = json.loads(value)
    return values


def execute(
    chosen: Sequence[Notebook],
    parameters: Mapping[str, object] | None = None,
    out: str | Path = "build",
    core: bool = False,
    solved: bool = False,
) -> list[Execution]:
    """Run notebooks one after the other in their own folders; with `core` without optional cells.

    `solved`: gaps and exercises have the kit's lines.

    Raises LessonError before anything starts if a notebook lacks a parameter.
    """
    from papermill import inspect_notebook  # papermill takes a second to import
    from tqdm import tqdm
    from traitlets.config import Config

    for notebook in chosen if parameters else []:
        there = inspect_notebook(str(notebook.path))
        for name in parameters.keys() - there.keys():
            raise LessonError(
                f"{notebook.name} has no parameter {name}: {hint(name, there, ', '.join(there))}"
            )
    (folder := Path(out).absolute() / "notebooks").mkdir(parents=True, exist_ok=True)
    queues = os.environ.get("AISCALE_ENGINES") == "slurm" and "SLURM_JOB_ID" not in os.environ
    options: dict = {
        "execution_timeout": None if queues else CELL_TIMEOUT_S,
        "shutdown_kernel": "immediate",  # -2 s
    }
    os.environ.update(_environment())
    results = []
    with (
        tempfile.TemporaryDirectory(prefix=".lesson-", dir=folder.parent) as progress,
        # a short path; another process may take a port
        tempfile.TemporaryDirectory(dir="/tmp") as sockets,
    ):
        # a participant's own stays as it is; compute nodes see it
        os.environ["AISCALE_PROGRESS"] = progress
        options["config"] = Config(
            {"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}}
        )
        for notebook in (bar := tqdm(chosen, unit="notebook", disable=None)):
            bar.set_description(notebook.name)
            writes = any(
                "parameters" in tags(cell) and "\nfolder = " in f"\n{cell.source}"
                for cell in notebook.cells
            )
            # nor are their scripts touched
            scripts = {"folder": f"{progress}/my"} if writes else {}
            source = _solved(notebook, Path(progress)) if solved else notebook.path
            given = scripts | dict(parameters or {})
            results.append(_execute(notebook, source, folder, given, core, options))
    return results


def _solved(notebook: Notebook, folder: Path) -> Path:
    """A copy whose gaps and exercises are filled."""
    import nbformat

    # imports the graders' libraries
    from aiscale.lesson.workbooks import solved

    copy = folder / notebook.path.name
    nbformat.write(solved(notebook), copy)
    return copy


def _execute(
    notebook: Notebook, source: Path, folder: Path, parameters: dict, core: bool, options: dict
) -> Execution:
    import papermill
    from nbconvert.filters import strip_ansi

    executed, started, error = folder / f"{notebook.name}.ipynb", time.monotonic(), ""
    executed.unlink(missing_ok=True)
    try:
        papermill.execute_notebook(
            source,
            executed,
            parameters,
            kernel_name="python3",
            cwd=str(notebook.path.resolve().parent),
            progress_bar={"leave": False, "disable": None},
            # a twentieth of a second a cell; a failed copy is saved, too
            request_save_on_cell_execute=False,
            **options,
            **({"skip_cells_with_tag": OPTIONAL} if core else {}),
        )
    except Exception as raised:  # an error in a cell, a dead kernel, a time-out
        cell = shown(executed)
        whole = cell and isinstance(raised, papermill.PapermillExecutionError)
        error = strip_ansi(cell if whole else f"{type(raised).__name__}: {raised}\n{cell}")
    return Execution(notebook.name, round(time.monotonic() - started, 2), str(executed), error)


def shown(executed: Path) -> str:
    """What the failing cell of an executed copy showed.

    A rank's error may be text, display data or the error.
    """
    for cell in read(executed).cells if executed.exists() else []:
        outputs = cell.get("outputs", [])
        if any(output.output_type == "error" for output in outputs):
            plain = (out.get("text") or out.get("data", {}).get("text/plain") for out in outputs)
            parts = (
                text or "\n".join(out.get("traceback", []))
                for text, out in zip(plain, outputs, strict=True)
            )
            return "\n".join([cell.source, "", *parts])
    return ""


def _environment() -> dict[str, str]:
    """For the kernels: programs of this environment first, one thread, nothing from the hub.

    More threads only slow such small models down.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    threads = os.environ.get("OMP_NUM_THREADS") or "1"
    # where ranks in a job keep their files
    runs = str(Path(os.environ.get("AISCALE_RUNS") or "runs").absolute())
    kernels = {
        "PATH": path,
        "OMP_NUM_THREADS": threads,
        "AISCALE_RUNS": runs,
        "PYTHONUNBUFFERED": "1",
    }
    return kernels | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
