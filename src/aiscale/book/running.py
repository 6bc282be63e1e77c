"""Run notebooks headless, one after the other, each in a process of its own that is watched from outside.

    results = run(["03"], {"steps": 5}, out="build")

What a run guarantees:
  - parameters are checked by name and type before anything starts
  - the kernel is python3 of this environment, whatever kernels the user has; it works in an empty folder, offline
  - a cell that takes longer than `cell_timeout_s` is interrupted, so that its traceback shows where it hung; a notebook
    ends after `timeout_s`; a dead kernel is seen within seconds
  - the executed copy is kept, of a failed notebook too
  - nothing that the notebook started outlives it
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from aiscale.book import reaping
from aiscale.book.failure import explain
from aiscale.book.notebook import BookError, Notebook, notebooks
from aiscale.book.progress import Progress
from aiscale.book.results import Ledger, Result, content_key

CELL_TIMEOUT_S = 120.0
TIMEOUT_S = 600.0
QUEUE_S = 86400.0  #: that a job with a notebook's ranks may wait for its start
START_TIMEOUT_S = 60
MOST_THREADS = 4
_POLL_S = 0.1
_AFTER_INTERRUPT_S = 15.0  #: within which an interrupted cell is expected to end
_KERNEL_GONE_S = 30.0  #: nbclient sees a dead kernel itself within seconds, except when it dies between two cells
_KERNEL_DIED = "the kernel died"
_GRACE_S = 3.0  #: for engines to end after their kernel
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def run(
    names: Sequence[str] | None = None,
    parameters: Mapping[str, object] | None = None,
    *,
    root: str | Path | None = None,
    out: str | Path = "build",
    cell_timeout_s: float | None = None,
    timeout_s: float | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> list[Result]:
    """Run notebooks in reading order and write their executed copies to OUT/notebooks.

    With `resume`, a notebook that passed and of which nothing has changed since is not run again. Raises BookError
    before anything starts where a name, a parameter or a folder is wrong; a notebook that fails is a Result. A time
    limit that is not given is CELL_TIMEOUT_S or TIMEOUT_S, and QUEUE_S more where ranks wait in a queue.
    """
    cell_timeout_s, timeout_s = limits(cell_timeout_s, timeout_s)
    chosen = notebooks(names, root)
    accepted = [notebook.accept(parameters or {}) for notebook in chosen]
    folder = _writable(Path(out) / "notebooks")
    ledger = Ledger(folder)
    earlier = ledger.load() if resume else {}
    progress = progress or Progress()
    results = []
    with progress.over(chosen):
        for notebook, values in zip(chosen, accepted, strict=True):
            key = content_key(notebook, values)
            result = earlier.get(notebook.name)
            if result and result.key == key and result.state == "passed" and Path(result.executed).exists():
                progress.kept(result)
            else:
                ledger.forget(notebook.name)
                execution = _Execution(notebook, values, folder, cell_timeout_s, timeout_s, progress)
                result = execution.run(key)
                ledger.record(result)
                progress.finished(result)
            results.append(result)
            if result.state == "interrupted":
                break
    return results


def limits(cell_timeout_s: float | None = None, timeout_s: float | None = None) -> tuple[float, float]:
    """Seconds for a cell and for a notebook, where they are not given."""
    queues = os.environ.get("AISCALE_ENGINES") == "slurm" and "SLURM_JOB_ID" not in os.environ
    wait_s = QUEUE_S if queues else 0.0
    cell_timeout_s = CELL_TIMEOUT_S + wait_s if cell_timeout_s is None else cell_timeout_s
    return cell_timeout_s, TIMEOUT_S + wait_s if timeout_s is None else timeout_s


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise BookError(f"{folder} cannot be written to ({error.strerror}): choose another folder with --out") from None
    return folder.resolve()


class _Execution:
    """One notebook on its way through papermill."""

    def __init__(
        self,
        notebook: Notebook,
        parameters: dict,
        folder: Path,
        cell_timeout_s: float,
        timeout_s: float,
        progress: Progress,
    ) -> None:
        self.notebook, self.parameters, self.progress = notebook, parameters, progress
        self.cell_timeout_s, self.timeout_s = cell_timeout_s, timeout_s
        self.target = folder / f"{notebook.name}.ipynb"
        self.log = folder / f"{notebook.name}.log"
        self.id = uuid.uuid4().hex
        code = [cell.get("id") for cell in notebook.content.cells if cell.cell_type == "code"]
        self.numbers = {cell: number for number, cell in enumerate(code, 1)}
        self.current = ""  #: id of the cell that runs
        self.ending = ""  #: why the notebook is being ended
        self.event: dict = {}  #: the last word of the process that executes
        self._kernel: psutil.Process | None = None
        self._kernel_gone_at = 0.0

    def run(self, key: str) -> Result:
        """Execute; never raises for what the notebook does. Ctrl-C gives a result of state interrupted."""
        self.target.unlink(missing_ok=True)
        started = time.monotonic()
        interrupted, left_behind, cut_short = False, 0, False
        with tempfile.TemporaryDirectory(prefix="aiscale-book-", ignore_cleanup_errors=True) as private:
            try:
                self.progress.started(self.notebook, len(self.numbers))
                self._watch(self._start(Path(private)), started)
            except KeyboardInterrupt:
                interrupted = True
            finally:
                cut_short = interrupted or self.ending not in ("", _KERNEL_DIED)
                left_behind = reaping.reap(self.id, 0.0 if cut_short else _GRACE_S)
        failure = None
        if not interrupted and (self.ending or self.event.get("event") != "done"):
            failure = explain(self.notebook, self.target, self.current, self.ending, self.event, self.log)
        if not failure:
            self.log.unlink(missing_ok=True)
        return Result(
            name=self.notebook.name,
            state="interrupted" if interrupted else "failed" if failure else "passed",
            seconds=round(time.monotonic() - started, 2),
            cells=len(self.numbers),
            parameters=self.parameters,
            failure=failure,
            executed=str(self.target),
            left_behind=0 if cut_short else left_behind,
            key=key,
        )

    def _start(self, private: Path) -> subprocess.Popen:
        work = private / "work"
        work.mkdir()
        job = {
            "source": str(self.notebook.path.resolve()),
            "target": str(self.target),
            "parameters": self.parameters,
            "cwd": str(work),
            "cell_timeout_s": self.cell_timeout_s,
            "start_timeout_s": START_TIMEOUT_S,
            "events": str(private / "events"),
            "sockets": str(private / "kernel"),
            "parent": os.getpid(),
        }
        (private / "job.json").write_text(json.dumps(job))
        (private / "events").touch()
        self._events = open(private / "events", "rb")  # a file, because a full pipe would block whoever writes it
        with open(self.log, "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "aiscale.book.execute", str(private / "job.json")],
                env=_environment(self.id, private),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in a terminal is for this process, which then ends the other.
                start_new_session=True,
            )

    def _watch(self, process: subprocess.Popen, started: float) -> None:
        cell_started, kill_at = started + START_TIMEOUT_S, None
        with self._events:
            while process.poll() is None:
                time.sleep(_POLL_S)
                if self._read_events():
                    cell_started = time.monotonic()
                now = time.monotonic()
                self.progress.tick()
                if kill_at is None:
                    if now - cell_started > self.cell_timeout_s:
                        self.ending = f"the cell took longer than {self.cell_timeout_s:g} s"
                    elif now - started > self.timeout_s:
                        self.ending = f"the notebook took longer than {self.timeout_s:g} s"
                    elif self._kernel_is_gone(process, now):
                        self.ending = _KERNEL_DIED
                        process.kill()
                    if self.ending:
                        self._interrupt_kernel()
                        kill_at = now + _AFTER_INTERRUPT_S
                elif now > kill_at:
                    process.kill()
                    break
            process.wait()
            self._read_events()

    def _read_events(self) -> bool:
        """Take in what the process says; True when a cell has started."""
        moved = False
        while (line := self._events.readline()).endswith(b"\n"):
            self.event = json.loads(line)
            if self.event["event"] == "cell" and not self.event["injected"]:
                self.current, moved = self.event["id"], True
                self.progress.cell(self.numbers.get(self.current, 0))
        if line:  # half a line: come back for the whole
            self._events.seek(-len(line), os.SEEK_CUR)
        return moved

    def _find_kernel(self, process: subprocess.Popen) -> psutil.Process | None:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if "ipykernel_launcher" in child.cmdline():
                        return child
        return None

    def _kernel_is_gone(self, process: subprocess.Popen, now: float) -> bool:
        """Whether the kernel has been dead for longer than the process that executes takes to notice."""
        if self.event.get("event", "cell") != "cell":  # that process ends it
            return False
        if self._kernel is None:
            self._kernel = self._find_kernel(process)
            return False
        with contextlib.suppress(psutil.Error):
            if self._kernel.is_running() and self._kernel.status() != psutil.STATUS_ZOMBIE:
                self._kernel_gone_at = 0.0
                return False
        self._kernel_gone_at = self._kernel_gone_at or now
        return now - self._kernel_gone_at > _KERNEL_GONE_S

    def _interrupt_kernel(self) -> None:
        if self._kernel is not None:
            with contextlib.suppress(psutil.Error):
                self._kernel.send_signal(signal.SIGINT)


def _environment(run_id: str, private: Path) -> dict[str, str]:
    """What a notebook's processes see: this environment's kernel and programs, nothing of the user's own Jupyter."""
    kernel = private / "jupyter" / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": command, "display_name": "Python 3", "language": "python"}))
    threads = str(min(MOST_THREADS, len(os.sched_getaffinity(0)) if sys.platform == "linux" else MOST_THREADS))
    return {
        **dict.fromkeys(_THREAD_VARIABLES, threads),
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "JUPYTER_PATH": str(private / "jupyter"),
        "JUPYTER_RUNTIME_DIR": str(private / "runtime"),
        "IPYTHONDIR": str(private / "ipython"),
        # The kernel works in a folder that compute nodes do not see; its ranks' files go where this was started.
        "AISCALE_RUNS": str(Path(os.environ.get("AISCALE_RUNS") or "runs").absolute()),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        reaping.MARKER: run_id,
    }
