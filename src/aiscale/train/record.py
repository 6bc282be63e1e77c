"""The record of a run, in the folder of its checkpoints: run.json and metrics.jsonl. Rank 0 writes.

run.json says what was trained, with what, where, and how it ended. metrics.jsonl has a line for each
step (kind train) and each evaluation (kind eval).
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import socket
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = ("aiscale", "torch", "transformers", "deepspeed", "megatron-core")
#: A training goes on only with the same value of these.
LASTING = "model length batch held_out seed optimizer bf16 fp16 fp64 no_zero1".split()
#: Trainers whose checkpoints are their library's.
OWN_CHECKPOINTS = ("zero", "megatron")


class Record:
    """The files of one run."""

    def __init__(self, args, first, world_size, text_digest, trainer):
        self.folder = Path(args.save)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock()
        self.note = {
            "trainer": trainer,
            "options": vars_of(args),
            "text_sha256": text_digest,
            "world_size": world_size,
            "status": "running",
            "started": now(),
            "command": sys.argv,
            "versions": versions(),
            "machine": machine(),
        }
        self.check_same_text()
        self.write_note()
        self.rewind(first)
        self.metrics = (self.folder / "metrics.jsonl").open("a", buffering=1)

    def lock(self):
        """Keeps other jobs out of the folder, where its file system has locks."""
        self.locked = (self.folder / ".lock").open("a")
        try:
            fcntl.flock(self.locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(
                f"--save {self.folder}: another job writes there; wait, or choose another folder"
            ) from None
        except OSError:
            pass

    def check_same_text(self):
        file = self.folder / "run.json"
        before = json.loads(file.read_text()) if file.exists() else self.note
        if before["text_sha256"] != self.note["text_sha256"]:
            was = f"--text was another text ({before['options']['text']})"
            raise SystemExit(f"{file}: {was}: choose another --save than {self.folder}")

    def rewind(self, first):
        """Drops what a run that was stopped has noted after its last checkpoint."""
        file = self.folder / "metrics.jsonl"
        if not file.exists():
            return
        kept = [line for line in read_metrics(self.folder, kind=None) if line["step"] < first]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        write_whole(file, text)

    def add(self, kind, **values):
        self.metrics.write(json.dumps({"kind": kind, **values}) + "\n")

    def finish(self, status):
        self.note |= {"status": status, "ended": now()}
        self.write_note()
        self.metrics.close()
        self.locked.close()

    def write_note(self):
        write_whole(self.folder / "run.json", json.dumps(self.note, indent=1))


def check_same_training(args, trainer):
    """Stops if the folder of --save has another training, before its weights are read."""
    file = Path(args.save) / "run.json"
    if not file.exists():
        return
    before = json.loads(file.read_text())
    other = f"choose another --save than {args.save}"
    if "options" not in before:
        kind = "was written by an earlier aiscale, whose checkpoints this one cannot read"
        raise SystemExit(f"{file} {kind}: {other}")
    was = before["trainer"]
    if was != trainer and (was in OWN_CHECKPOINTS or trainer in OWN_CHECKPOINTS):
        raise SystemExit(f"{file} is of {was}, whose checkpoints {trainer} cannot read: {other}")
    for name in LASTING:
        was, wanted = before["options"].get(name, False), getattr(args, name, False)
        if was != wanted:
            option = "--" + name.replace("_", "-")
            raise SystemExit(f"{file} has {option} {was}, not {wanted}: {other}, or that value")


def read_metrics(folder, kind="train"):
    """The lines of one kind (train, eval; None: all); a job that was killed may leave half a line."""
    lines = []
    for line in (Path(folder) / "metrics.jsonl").read_text().splitlines():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return [line for line in lines if kind in (None, line["kind"])]


def write_whole(file, text):
    """The old text or the new one is there, whatever happens."""
    part = file.with_name(f".{file.name}.part")
    part.write_text(text)
    os.replace(part, file)


def vars_of(args):
    """Options as JSON holds them."""
    return {name: value for name, value in vars(args).items() if not hasattr(value, "read")}


def versions():
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def machine():
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "device": device,
        "threads_per_rank": torch.get_num_threads(),
    }


def now():
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
