"""The files of a run: runs/NAME/{run.json, metrics.jsonl, tokenizer.json, checkpoints/}. Only rank 0 writes them.

`run.json` says what was trained, with which versions, on which machine and corpus, and how it ended. `metrics.jsonl`
has one line per step (kind train) and evaluation (kind eval), and at the end one per rank (kind rank).
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import psutil
import torch

from aiscale import checkpoint
from aiscale.config import ConfigError, Run, require_writable, write_whole
from aiscale.data import Tokenizer
from aiscale.distributed import World
from aiscale.model import GPT
from aiscale.model.build import HFModel, build_model
from aiscale.processes import usable_cores

_LOCK = ".lock"
_PACKAGES = ("aiscale", "torch", "numpy", "transformers", "deepspeed", "megatron-core", "mpi4py")


class RunFolderError(RuntimeError):
    """A run folder must not be overwritten or cannot be resumed; the message is one line."""


class Records:
    """The files of one run, on rank 0."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics = None
        self._lock = None

    @staticmethod
    def check(path: Path, run: Run, *, sha256: str, resume: bool, overwrite: bool) -> None:
        """Refuse to overwrite another run's results silently, and to resume a different training. Changes nothing."""
        require_writable(path, "--runs-dir")
        exists = (path / "run.json").exists()
        Records(path).lock().close()
        if resume and overwrite:
            raise RunFolderError("--resume and --overwrite exclude each other: give one of them")
        if resume and not exists:
            raise RunFolderError(f"{path} holds no run to resume: start it without --resume")
        if resume:
            _check_same_training(path, run, sha256)
        elif exists and not overwrite:
            raise RunFolderError(f"{path} already holds a run: add --resume, --overwrite or --set name=OTHER")

    @staticmethod
    def open(path: Path, *, overwrite: bool) -> Records:
        """Claim the folder; delete an earlier run's results if `overwrite` is set."""
        path.mkdir(parents=True, exist_ok=True)
        records = Records(path).lock()
        if overwrite and (path / "run.json").exists():
            _clear(path)
        return records

    def lock(self) -> Records:
        """Keep other runs out of the folder until close(), if its file system has locks."""
        if not self.path.is_dir() or not os.access(self.path, os.W_OK):
            return self
        stream = (self.path / _LOCK).open("a")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.close()
            what = "is being written by another run: wait for it, stop it, or use --set name=OTHER"
            raise RunFolderError(f"{self.path} {what}") from None
        except OSError:
            pass  # no locks here: batch jobs have --dependency=singleton
        self._lock = stream
        return self

    def close(self) -> None:
        for stream in (self._metrics, self._lock):
            if stream:
                with suppress(OSError):  # a full disk, of which an earlier write has told
                    stream.close()
        self._metrics = self._lock = None

    def describe(self, run: Run, world: World, **facts) -> None:
        """Write run.json; `facts` are added to it."""
        self._note = {
            "run": run.to_dict(),
            "status": "running",
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": sys.argv,
            "world": {
                "size": world.size,
                "launcher": world.launcher,
                "backend": world.backend,
                "processes": world.processes,  # (host, process id) in rank order: mpiexec names a dead rank by pid
            },
            "versions": versions(),
            "machine": machine(world.device),
            **facts,
        }
        self._write_note()

    def finish(self, status: str, **facts) -> None:
        self._note.update(status=status, ended=time.strftime("%Y-%m-%dT%H:%M:%S%z"), **facts)
        self._write_note()

    def rewind(self, step: int) -> None:
        """Drop the metrics after `step`: a resumed run repeats those steps."""
        file = self.path / "metrics.jsonl"
        if file.exists():
            lines = [record for record in _read_lines(file) if record["step"] <= step]
            self.write(file.name, "".join(json.dumps(record) + "\n" for record in lines))

    def append(self, kind: str, **values) -> None:
        if self._metrics is None:
            self._metrics = (self.path / "metrics.jsonl").open("a", buffering=1)
        self._metrics.write(json.dumps({"kind": kind, **values}) + "\n")

    def write(self, name: str, text: str) -> None:
        """Write a file of the run, atomically."""
        write_whole(self.path / name, text)

    def _write_note(self) -> None:
        self.write("run.json", json.dumps(self._note, indent=2))


def read_metrics(path: str | Path, kind: str = "train") -> list[dict]:
    """The lines of one kind (train, eval, rank) in a run's metrics.jsonl, in order."""
    return [record for record in _read_lines(Path(path) / "metrics.jsonl") if record["kind"] == kind]


def load_run(path: str | Path) -> Run:
    file = Path(path) / "run.json"
    try:
        return Run.from_dict(json.loads(file.read_text())["run"])
    except ConfigError as error:
        raise RunFolderError(f"{file} does not fit this version of aiscale: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise RunFolderError(f"{path} is not a run folder: it has no readable run.json") from None


def open_trained(path: str | Path) -> tuple[GPT | HFModel, Tokenizer]:
    """(model, tokenizer) of a run folder's newest checkpoint, in fp32."""
    path = Path(path)
    if _is_of_a_trainer(path):
        return _open_trainers(path)
    run = load_run(path)
    newest = checkpoint.latest(path / "checkpoints")
    if newest is None:
        raise RunFolderError(f"{path} holds no whole checkpoint: let the run reach one (loop.checkpoint_every)")
    model = build_model(run.model, weights=False)
    weights = model.state_dict()
    checkpoint.load_weights(weights, newest)
    model.load_state_dict(weights)
    return model.eval(), Tokenizer.from_json((path / "tokenizer.json").read_text(encoding="utf-8"))


def _is_of_a_trainer(path: Path) -> bool:
    try:
        return "options" in json.loads((path / "run.json").read_text())
    except (OSError, ValueError):
        return False  # `load_run` says why


def _open_trainers(path: Path):
    from aiscale.data.tokenizers import learn
    from aiscale.train.presets import shape_of
    from aiscale.train.record import read_note
    from aiscale.train.trained import open_folder

    model, text = open_folder(path)
    model.config.max_seq_len = shape_of(read_note(path)["options"]["model"]).context
    return model, Tokenizer.from_json(text) if text else learn("byte", iter(()))


def versions() -> dict[str, str]:
    facts = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    here = Path(__file__).parent
    git = subprocess.run(["git", "-C", here, "describe", "--always", "--dirty"], capture_output=True, text=True)
    if git.returncode == 0:
        facts["commit"] = git.stdout.strip()
    return facts


def machine(device: torch.device) -> dict:
    """Host, processor, memory and device, for run.json."""
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(usable_cores()),
        "threads_per_rank": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _check_same_training(path: Path, run: Run, sha256: str) -> None:
    """Refuse a different training: another model or data, other batches, another optimizer state."""
    before, now = load_run(path).to_dict(), run.to_dict()
    keys = [(section, key) for section in ("model", "data") for key in now[section]]
    keys += [("loop", key) for key in ("seq_len", "global_batch", "precision")] + [("optimizer", "name")]
    for section, key in keys:
        if before[section][key] != now[section][key]:
            what = f"{section}.{key}={before[section][key]}, not {now[section][key]}"
            raise RunFolderError(f"{path} was trained with {what}: start another run with --set name=OTHER")
    trained_on = json.loads((path / "run.json").read_text()).get("corpus", {}).get("sha256", sha256)
    if trained_on != sha256:
        what = f"another text under data.corpus {run.data.corpus} (sha256 {trained_on[:8]}, now {sha256[:8]})"
        raise RunFolderError(f"{path} was trained on {what}: start another run with --set name=OTHER")


def _read_lines(file: Path) -> list[dict]:
    """The records of a JSONL file; the last line may be incomplete if the job was killed."""
    *lines, last = file.read_text().splitlines() or [""]
    records = [json.loads(line) for line in lines]
    with suppress(ValueError):
        records.append(json.loads(last))
    return records


def _clear(path: Path) -> None:
    """Delete an earlier run's results, but not the lock that we hold."""
    for item in path.iterdir():
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        elif item.name != _LOCK:
            item.unlink()
