"""Damages a checkpoint in one place, and resumes the run.

    said = resume_after_damage(whole, folder, seed=7, losses=losses)    # "" if the run went back, and said so

No damage may give a silently wrong run: it resumes from the checkpoint before, with the losses of the undamaged run.
"""

from __future__ import annotations

import contextlib
import io
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

from aiscale.config import Run
from aiscale.train import fit

TINY = Run(name="tiny").override(
    *("model.n_layer=1", "model.n_head=2", "model.d_model=16", "model.max_seq_len=16", "loop.seq_len=16"),
    *("loop.global_batch=4", "loop.eval_batches=1", "loop.eval_every=0", "loop.device=cpu"),
    *("loop.steps=6", "loop.checkpoint_every=2", "loop.keep_checkpoints=3", "optimizer.schedule=constant"),
)
NEWEST, BEFORE = "step_00000006", "step_00000004"


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
    act, path = HARMS[seed % len(HARMS)], chance.choice(sorted(file for file in checkpoint.iterdir() if file.is_file()))
    act(path, chance)
    return f"{act.__name__} {path.name}"


def train_whole(folder: Path) -> list[float]:
    """Train the run whose checkpoints are damaged in copies; returns its losses."""
    return fit(TINY, runs_dir=folder, progress=False).losses


def resume_after_damage(whole: Path, folder: Path, *, seed: int, losses: Sequence[float]) -> str:
    """Copy the runs in `whole` to `folder`, damage the newest checkpoint, resume; returns what is wrong, or ""."""
    shutil.copytree(whole, folder)
    newest = folder / TINY.name / "checkpoints" / NEWEST
    done = harm(newest, seed)
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            resumed = fit(TINY.override("loop.steps=7"), runs_dir=folder, resume=True, progress=False)
    except Exception as error:
        return f"{done}: the run did not go on: {type(error).__name__}: {error}"
    if resumed.losses[:2] != list(losses[4:]) or len(resumed.losses) != 3:
        return f"{done}: the run did not go on from {BEFORE} with the same losses"
    told = f"{NEWEST} is " in said.getvalue() and f"going back to {BEFORE}" in said.getvalue()
    return "" if told else f"{done}: the run went back to {BEFORE} and said {said.getvalue()!r}"
