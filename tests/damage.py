"""Damages a checkpoint in one place, and lets the run go on.

    said = resume_after_damage(whole, folder, seed=7, losses=losses)

It is "" if the run went back, and said so. No damage may give a silently wrong run: it goes on from
the checkpoint before, with the losses of the undamaged run.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from aiscale.train.record import read_metrics
from ranks import forked

TINY = ("--model", "1x16", "--length", "16", "--batch", "4", "--save-every", "2")
NEWEST, BEFORE = "00000006", "00000004"


def flip_a_bit(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def remove(path: Path, chance: random.Random) -> None:
    path.unlink()


def lengthen(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + bytes(chance.randrange(1, 100)))


HARMS = (flip_a_bit, flip_a_bit, cut, remove, lengthen)


def harm(checkpoint: Path, seed: int) -> str:
    """Damage one file of a checkpoint; returns the kind of damage and the file, in words."""
    chance = random.Random(seed)
    act = HARMS[seed % len(HARMS)]
    path = chance.choice(sorted(file for file in checkpoint.iterdir() if file.is_file()))
    act(path, chance)
    return f"{act.__name__} {path.name}"


def train(folder: Path, *, steps: int) -> subprocess.CompletedProcess:
    """The run whose checkpoints are damaged, until `steps`."""
    words = ["-m", "aiscale.train.serial", *TINY, "--steps", str(steps), "--save", str(folder)]
    return forked(words, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})


def losses_of(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder)]


def train_whole(folder: Path) -> list[float]:
    """Train the run whose checkpoints are damaged in copies; returns its losses and a step more."""
    for steps in (6, 7):
        done = train(folder / f"until{steps}", steps=steps)
        assert done.returncode == 0, done.stderr
    return losses_of(folder / "until7")


def resume_after_damage(whole: Path, folder: Path, *, seed: int, losses: Sequence[float]) -> str:
    """Copy the run in `whole` to `folder`, damage the newest checkpoint, go on.
    Returns what is wrong, or ""."""
    shutil.copytree(whole / "until6", folder)
    done = harm(folder / NEWEST, seed)
    again = train(folder, steps=7)
    if again.returncode:
        return f"{done}: the run did not go on: {again.stderr}"
    if losses_of(folder) != list(losses):
        return f"{done}: the run went on with other losses"
    steps = [line.split()[1] for line in again.stdout.splitlines() if " loss " in line]
    told = f"{NEWEST} is damaged" in again.stderr and "going back" in again.stderr
    if steps == ["4", "5", "6"] and told:
        return ""
    return f"{done}: the run took steps {steps} and said {again.stderr!r}"
