"""What a run leaves on disk: runs/NAME/{run.json, metrics.jsonl, tokenizer.json, checkpoints/}.

Only rank 0 writes. `run.json` says what was trained, with which versions, on which machine and corpus, and how it
ended; `metrics.jsonl` has one line a step (kind train) or evaluation (kind eval), and nothing ever parses a log.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import psutil
import torch

from aiscale.config import Run
from aiscale.dist import World

_PACKAGES = ("aiscale", "torch", "numpy", "transformers", "deepspeed", "megatron-core", "mpi4py")


class RunFolderError(RuntimeError):
    """A run folder that must not be overwritten or cannot be resumed; the message is one line."""


class Records:
    """The files of one run. Made on rank 0; the other ranks make none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics = None

    @staticmethod
    def check(path: Path, run: Run, *, resume: bool, overwrite: bool) -> None:
        """Refuse to overwrite another run's results silently, and to resume what cannot be. Changes nothing."""
        exists = (path / "run.json").exists()
        if resume and overwrite:
            raise RunFolderError("--resume and --overwrite contradict each other: choose one")
        if resume and not exists:
            raise RunFolderError(f"{path} holds no run to resume: start it without --resume")
        if resume:
            _check_same_model(path, run)
        elif exists and not overwrite:
            raise RunFolderError(
                f"{path} already holds a run: add --resume to continue it, --overwrite to replace it, "
                "or --set name=OTHER"
            )

    @staticmethod
    def open(path: Path, *, overwrite: bool) -> Records:
        """Claim the folder, dropping an earlier run's results if `overwrite` says so."""
        if overwrite and (path / "run.json").exists():
            shutil.rmtree(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(
                f"cannot write results to {path} ({error.strerror}): choose another folder with --runs-dir"
            ) from None
        return Records(path)

    def describe(self, run: Run, world: World, **facts) -> None:
        """Write run.json; `facts` are added to it."""
        self._note = {
            "run": run.to_dict(),
            "status": "running",
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": sys.argv,
            "world": {"size": world.size, "launcher": world.launcher, "backend": world.backend},
            "versions": versions(),
            "machine": machine(world.device),
            **facts,
        }
        self._write()

    def finish(self, status: str, **facts) -> None:
        """Add how the run ended to run.json."""
        self._note.update(status=status, ended=time.strftime("%Y-%m-%dT%H:%M:%S%z"), **facts)
        self._write()
        if self._metrics:
            self._metrics.close()

    def rewind(self, step: int) -> None:
        """Drop the metrics after `step`: a resumed run takes those steps again."""
        file = self.path / "metrics.jsonl"
        if file.exists():
            kept = [line for line in file.read_text().splitlines() if json.loads(line)["step"] <= step]
            _write_whole(file, "".join(line + "\n" for line in kept))

    def append(self, kind: str, **values) -> None:
        """Add one line to metrics.jsonl."""
        if self._metrics is None:
            self._metrics = (self.path / "metrics.jsonl").open("a", buffering=1)
        self._metrics.write(json.dumps({"kind": kind, **values}) + "\n")

    def write(self, name: str, text: str) -> None:
        """Write another file of the run, whole or not at all."""
        _write_whole(self.path / name, text)

    def _write(self) -> None:
        _write_whole(self.path / "run.json", json.dumps(self._note, indent=2))


def read_metrics(path: str | Path, kind: str = "train") -> list[dict]:
    """The lines of one kind (train, eval) in a run's metrics.jsonl, in order."""
    lines = (Path(path) / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == kind]


def load_run(path: str | Path) -> Run:
    """The Run that a run folder holds."""
    file = Path(path) / "run.json"
    try:
        return Run.from_dict(json.loads(file.read_text())["run"])
    except (OSError, ValueError, KeyError):
        raise RunFolderError(
            f"{path} is no run folder: it has no readable run.json; name one like runs/laptop"
        ) from None


def versions() -> dict[str, str]:
    """The versions that decide what is computed, and the commit of aiscale where it runs from a checkout."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    here = Path(__file__).parent
    git = subprocess.run(["git", "-C", here, "describe", "--always", "--dirty"], capture_output=True, text=True)
    if git.returncode == 0:
        found["commit"] = git.stdout.strip()
    return found


def machine(device: torch.device) -> dict:
    """The machine, in words and numbers."""
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
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


def _check_same_model(path: Path, run: Run) -> None:
    before = json.loads((path / "run.json").read_text())["run"]
    for section in ("model", "data"):
        for key, value in run.to_dict()[section].items():
            if before[section].get(key) != value:
                raise RunFolderError(
                    f"{path} was trained with {section}.{key}={before[section].get(key)}, not {value}: "
                    "resume with the same model and data, or start another run with --set name=OTHER"
                )


def _write_whole(file: Path, text: str) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text)
    partial.replace(file)
