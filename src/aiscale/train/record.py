"""The record of a run, in the folder of its checkpoints: run.json and metrics.jsonl. Rank 0 writes.

run.json says what was trained, with what, where, and how it ended. metrics.jsonl has a line for
each step (kind train) and each evaluation (kind eval).
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import socket
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch

from aiscale.train.layout import other_experts

PACKAGES = ("aiscale", "torch", "transformers", "deepspeed", "megatron-core")
#: A training goes on only with the same value of these.
LASTING = "model length batch held_out seed optimizer bf16 fp16 fp64 no_zero1 experts".split()
OWN_CHECKPOINTS = ("zero", "megatron")  #: trainers whose checkpoints are their library's
TRAINER = Path(sys.argv[0]).stem  #: the script that runs
LOCKED = []  #: the file whose lock this process has until it ends


class Record:
    """The files of one run. `processes`: host and process id of each rank."""

    def __init__(self, args, first, world_size, text_digest, processes=()):
        self.folder = Path(args.save)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.note = {
            "trainer": TRAINER,
            "options": vars_of(args),
            "text_sha256": text_digest,
            "world_size": world_size,
            "nodes": nodes(world_size),
            "processes": processes,
            "first_step": first,
            "status": "running",
            "started": now(),
            "command": sys.argv,
            "versions": versions(),
            "machine": machine(),
        }
        self.write_note()
        tokenizer = Path(args.text) / "tokenizer.json"
        if tokenizer.exists():  # of a folder of `aiscale data prepare`
            shutil.copyfile(tokenizer, self.folder / tokenizer.name)
        self.rewind(first)
        self.metrics = (self.folder / "metrics.jsonl").open("a", buffering=1)

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

    def write_note(self):
        write_whole(self.folder / "run.json", json.dumps(self.note, indent=1))


def read_note(folder):
    """run.json of a folder, or None."""
    file = Path(folder) / "run.json"
    return json.loads(file.read_text()) if file.exists() else None


def other_job(args):
    """Keeps other jobs out of --save, where the file system has locks; or says one is there."""
    folder = Path(args.save)
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return f"--save {folder}: another job writes there; wait, or choose another folder"
    except OSError:
        pass
    LOCKED.append(file)
    return None


def other_text(args, text_digest):
    """Why --save goes on with another text only, or None."""
    before = read_note(args.save)
    if before and before["text_sha256"] != text_digest:
        was = before["options"]["text"]
        return f"--save {args.save} learns from another text, {was}: choose another folder"
    return None


def other_training(args, world_size):
    """Why the training in --save is another one than these options ask for, or None."""
    before = read_note(args.save)
    if before is None:
        return None
    if "options" not in before:
        why = "holds a run of an earlier aiscale, whose checkpoints this one cannot read"
        return f"--save {args.save} {why}: choose another folder"
    was = before["trainer"]
    if was != TRAINER and (was in OWN_CHECKPOINTS or TRAINER in OWN_CHECKPOINTS):
        why = f"is of the trainer {was}, whose checkpoints {TRAINER} cannot read"
        return f"--save {args.save} {why}: choose another folder"
    if TRAINER == "zero" and before["world_size"] != world_size:
        was = before["world_size"]
        why = f"is of {was} ranks, and DeepSpeed's checkpoints go on with the same number"
        return f"--save {args.save} {why}: start {was} ranks, or choose another folder"
    for name in LASTING:
        was, wanted = before["options"].get(name, False), getattr(args, name, False)
        if was != wanted:
            option = "--" + name.replace("_", "-")
            return f"--save {args.save} has {option} {was}, not {wanted}: choose another folder"
    return other_experts(before["options"], args)


def read_metrics(folder, kind="train"):
    """The lines of one kind (train, eval; None: all). A killed job may leave half a line."""
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


def nodes(world_size):
    """How many machines the ranks are on; a launcher says how many of them are on this one."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return world_size // int(os.environ["LOCAL_WORLD_SIZE"])
    return int(os.environ.get("SLURM_STEP_NUM_NODES", 1))


def processor():
    """The name of its model, where the system tells it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cores():
    """Those that this rank may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def machine():
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "processor": processor(),
        "cores": cores(),
        "device": device,
        "threads_per_rank": torch.get_num_threads(),
    }


def now():
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
