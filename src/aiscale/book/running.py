"""Run notebooks headless, one after the other, each in a new process (`aiscale.book.execute`).

    results = run(["03"], {"steps": 5}, out="build")
    results = run(["03"], until="When are they sent?")     # the cells above this section

- parameters are checked by name and type before anything starts
- the kernel is python3 of this environment, whatever kernels the user has; it works in an empty folder, offline
- a dead kernel or engine fails the notebook within seconds, with the failing cell and its ranks' tracebacks
- a cell times out after `cell_timeout_s`, a notebook after `timeout_s`
- the executed copy is saved, of a failed notebook too; a notebook that passed and is unchanged need not run again
- every process that the notebook started is killed at its end

The results are in OUT/notebooks/results.json, beside the executed copies: `aiscale.book.results`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import aiscale
from aiscale.book.core import is_optional, place
from aiscale.book.notebook import BookError, Notebook, notebooks, read, tags
from aiscale.book.results import Failure, Result, load_results, save_result
from aiscale.config import require_writable
from aiscale.processes import kill_marked, marked, usable_cores

if TYPE_CHECKING:
    from nbformat import NotebookNode

CELL_TIMEOUT_S = 120.0
TIMEOUT_S = 600.0
QUEUE_S = 86400.0  #: that the job of a notebook's ranks may wait in the queue
START_TIMEOUT_S = 60
INTERRUPT_S = 15.0  #: for an interrupted cell to end
GRACE_S = 3.0  #: for engines to end after their kernel
MOST_THREADS = 4
MARKER = "AISCALE_BOOK"  #: environment variable inherited by all processes of a notebook
_LONGEST_LINES = 80
_COLOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
#: ipyparallel's error after the ranks' own errors, which adds no information.
_EMPTY_ERRORS = ("AlreadyDisplayedError", "CompositeError")


#: Called with a notebook's name, its state, the number of the code cell that starts (0: none yet), and the result once
#: there is one. States are "runs", those of a Result, and "unchanged".
Progress = Callable[[str, str, int, Result | None], None]


def run(
    names: Sequence[str] | None = None,
    parameters: Mapping[str, object] | None = None,
    *,
    root: str | Path | None = None,
    out: str | Path = "build",
    cell_timeout_s: float | None = None,
    timeout_s: float | None = None,
    core: bool = False,
    until: str = "",
    resume: bool = False,
    progress: Progress = lambda *_: None,
) -> list[Result]:
    """Run notebooks in reading order and write their executed copies to OUT/notebooks.

    With `core`, cells tagged `optional` are left out; with `until`, all cells from that section on. With `resume`, a
    notebook that passed and has not changed since is skipped. Raises BookError before anything starts if a name, a
    section, a parameter or a folder is wrong; a notebook that fails is a Result. The default time limits are
    CELL_TIMEOUT_S and TIMEOUT_S, plus QUEUE_S if ranks wait in a queue.
    """
    chosen = notebooks(names, root)
    cells = [to_run(notebook, core, until) for notebook in chosen]  # raises BookError
    accepted = [notebook.accept(parameters or {}) for notebook in chosen]
    folder = Path(out).absolute() / "notebooks"
    require_writable(folder, "--out")
    folder.mkdir(parents=True, exist_ok=True)
    earlier = load_results(folder) if resume else {}
    results = []
    for notebook, code, values in zip(chosen, cells, accepted, strict=True):
        key = _key(notebook, values, core, until)
        result = earlier.get(notebook.name)
        if result and result.key == key and result.state == "passed" and Path(result.executed).exists():
            progress(notebook.name, "unchanged", 0, result)
        else:
            save_result(folder, notebook.name, None)  # no result while the notebook runs
            limits_s = limits(cell_timeout_s, timeout_s)
            result = _execute(notebook, code, values, folder, limits_s, progress)
            result = replace(result, core=core, until=until, key=key)
            save_result(folder, notebook.name, result)
            progress(notebook.name, result.state, 0, result)
        results.append(result)
        if result.state == "interrupted":
            break
    return results


def limits(cell_timeout_s: float | None = None, timeout_s: float | None = None) -> tuple[float, float]:
    """Time limits of a cell and of a notebook in seconds, with defaults filled in."""
    queues = os.environ.get("AISCALE_ENGINES") == "slurm" and "SLURM_JOB_ID" not in os.environ
    wait_s = QUEUE_S if queues else 0.0
    cell_timeout_s = CELL_TIMEOUT_S + wait_s if cell_timeout_s is None else cell_timeout_s
    return cell_timeout_s, TIMEOUT_S + wait_s if timeout_s is None else timeout_s


def to_run(notebook: Notebook, core: bool, until: str = "") -> list[NotebookNode]:
    """The code cells that a run executes."""
    cells = notebook.content.cells
    above = cells[: place(cells, until)] if until else cells
    return [cell for cell in above if cell.cell_type == "code" and not (core and is_optional(cell))]


# one notebook -------------------------------------------------------------------------------------------------------


def _execute(
    notebook: Notebook, cells: list, parameters: dict, folder: Path, limits_s: tuple[float, float], progress: Progress
) -> Result:
    """Run one notebook; errors become part of its result, and Ctrl-C gives the state "interrupted"."""
    executed, log = folder / f"{notebook.name}.ipynb", folder / f"{notebook.name}.log"
    executed.unlink(missing_ok=True)
    code = [cell.get("id") for cell in cells]
    mark, started, said = uuid.uuid4().hex, time.monotonic(), None
    with tempfile.TemporaryDirectory(prefix="aiscale-book-", ignore_cleanup_errors=True) as private:
        try:
            progress(notebook.name, "runs", 0, None)
            job = {"source": str(notebook.path.resolve()), "target": str(executed), "parameters": parameters}
            job["skipped"] = [i for i, cell in enumerate(notebook.content.cells) if cell not in cells]
            process = _start(job, limits_s, Path(private), mark, log)
            said = _follow(process, code, lambda number: progress(notebook.name, "runs", number, None))
        except KeyboardInterrupt:
            pass
        finally:
            by_itself = said is not None and said["status"] >= 0
            left_behind = _end(mark, GRACE_S if by_itself else 0.0)
    failure = _explain(notebook, executed, said, log) if said and said["status"] else None
    if not failure:
        log.unlink(missing_ok=True)
    return Result(
        name=notebook.name,
        state="interrupted" if said is None else "failed" if failure else "passed",
        seconds=round(time.monotonic() - started, 2),
        cells=len(code),
        parameters=parameters,
        failure=failure,
        executed=str(executed),
        left_behind=left_behind if by_itself else 0,
    )


def _start(job: dict, limits_s: tuple[float, float], private: Path, mark: str, log: Path) -> subprocess.Popen:
    (private / "work").mkdir()
    job |= {
        "cell_timeout_s": limits_s[0],
        "timeout_s": limits_s[1],
        "interrupt_s": INTERRUPT_S,
        "start_timeout_s": START_TIMEOUT_S,
        "sockets": str(private / "kernel"),
        "parent": os.getpid(),
    }
    (private / "job.json").write_text(json.dumps(job))
    with open(log, "wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "aiscale.book.execute", str(private / "job.json")],
            env=_environment(mark, private),
            cwd=private / "work",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C in a terminal reaches only this process, which then ends the other
        )


def _environment(mark: str, private: Path) -> dict[str, str]:
    """Environment of a notebook's processes: this environment's kernel and programs, nothing of the user's own
    Jupyter."""
    kernel = private / "jupyter" / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": command, "display_name": "Python 3", "language": "python"}))
    return {
        "OMP_NUM_THREADS": str(min(MOST_THREADS, len(usable_cores()))),  # MKL, OpenBLAS and numexpr respect it
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "JUPYTER_PATH": str(private / "jupyter"),
        "JUPYTER_RUNTIME_DIR": str(private / "runtime"),
        "IPYTHONDIR": str(private / "ipython"),
        # Compute nodes do not see the kernel's folder; its ranks' files go to the starting directory.
        "AISCALE_RUNS": str(Path(os.environ.get("AISCALE_RUNS") or "runs").absolute()),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        MARKER: mark,
    }


def _follow(process: subprocess.Popen, code: Sequence[str], starts: Callable[[int], None]) -> dict:
    """The process's reports until it ends: `cell`, the last that started; `late`, the time-out to blame if it is
    killed; `error`; and its exit `status`. `code` holds the cells' ids."""
    said = {"cell": "", "late": "", "error": ""}
    with process.stdout:
        for line in process.stdout:
            event = json.loads(line)
            if (cell := event.pop("cell", "")) in code:  # not papermill's parameter cell
                said["cell"] = cell
                starts(code.index(cell) + 1)
            said |= event
    return {**said, "status": process.wait()}


def _end(mark: str, grace_s: float) -> int:
    """Wait `grace_s` for a notebook's processes to end, kill the rest; returns how many were killed."""
    end = time.monotonic() + grace_s
    while (left := marked(MARKER, mark)) and time.monotonic() < end:
        time.sleep(0.05)
    kill_marked(MARKER, mark)
    return len(left)


# why it failed ------------------------------------------------------------------------------------------------------


def _explain(notebook: Notebook, executed: Path, said: Mapping, log: Path) -> Failure:
    cell = _failing_cell(executed, said["cell"])
    errors = [output for output in cell.outputs if output.output_type == "error"] if cell else []
    error = next((e for e in errors if e.ename not in _EMPTY_ERRORS), None)
    shown = _shown(cell) if cell else ""
    if said["status"] == -signal.SIGALRM:
        message = said["late"]
    elif said["error"]:
        message = said["error"]
    elif error:
        message = f"{error.ename}: {error.evalue}"
    elif errors:
        message = next((line for line in reversed(shown.splitlines()) if line.strip()), errors[0].ename)
    else:
        message = "the process that ran it died"
    if not shown and log.exists():
        shown = _tail(log.read_text(errors="replace"))
    identity = cell.id if cell else said["cell"]  # its number in the source: papermill may have inserted cells
    places = (number for number, cell in enumerate(notebook.content.cells, 1) if cell.get("id") == identity)
    number = next(places, None)
    source = notebook.content.cells[number - 1].source if number else ""
    return Failure(message.strip().splitlines()[0], number, source, shown)


def _failing_cell(executed: Path, current: str) -> NotebookNode | None:
    """The first cell that failed without being tagged to, else the one that ran last."""
    try:
        cells = [cell for cell in read(executed).cells if cell.cell_type == "code"]
    except BookError:  # killed before or while it was written
        return None
    for cell in cells:
        if "raises-exception" not in tags(cell) and any(output.output_type == "error" for output in cell.outputs):
            return cell
    return next((cell for cell in cells if cell.get("id") == current), None)


def _shown(cell: NotebookNode) -> str:
    """Everything the cell showed: a rank's error may be text, display data or the error itself."""
    parts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            parts.append(output.text)
        elif output.output_type == "error" and output.ename not in _EMPTY_ERRORS:
            parts.append("\n".join(output.traceback) or f"{output.ename}: {output.evalue}")
        elif "text/plain" in output.get("data", {}):
            parts.append(output.data["text/plain"])
    return _tail("\n".join(_COLOR.sub("", part).rstrip() for part in parts))


def _tail(text: str) -> str:
    lines = text.rstrip().splitlines()
    return "\n".join(lines if len(lines) <= _LONGEST_LINES else ["...", *lines[-_LONGEST_LINES:]])


# what determines a result -------------------------------------------------------------------------------------------


def _key(notebook: Notebook, parameters: Mapping[str, object], core: bool, until: str) -> str:
    """A hash of all that determines the notebook's result: itself, its parameters, the package, the versions."""
    given = json.dumps([parameters, core, until], sort_keys=True, default=str).encode()
    parts = (notebook.path.read_bytes(), given, _surroundings())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


@cache
def _surroundings() -> bytes:
    digest = hashlib.sha256(f"{sys.version} torch {version('torch')}".encode())
    package = Path(aiscale.__file__).parent
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.digest()
