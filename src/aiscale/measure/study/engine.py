"""Runs the cells of a study, each in new processes, and writes each result to a file at once.

A cell is a trainer, started as a script on its ranks and measured by `cell.py`. Each round runs
the cells in a new random order, with the base between them, so that a drift of the machine shows
in the base and can be divided out. The same call resumes: a run whose file exists is not made
again. A cell that runs out of memory, crashes or takes too long is a result with that status.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from aiscale import train
from aiscale.errors import ConfigError, require_writable, write_whole
from aiscale.launch import launch
from aiscale.measure.study.grid import (
    WARM_UP,
    Cell,
    Study,
    epoch_of,
    options_of,
    run_of,
    trainer_of,
    words_of,
)
from aiscale.plan import cost
from aiscale.plan.config import ModelConfig
from aiscale.train.presets import shape_of

BASE_EVERY = 5  #: cells between two runs of the base
INTERRUPTED = (130, 128 + 15)  #: statuses of ranks after Ctrl-C and SIGTERM
#: the trainers, and what stands for one where nothing is trained
TRAIN, INFERENCE = Path(train.__file__).parent, Path(__file__).with_name("inference.py")
IN_MEMORY = Path("/dev/shm")  #: a file system of Linux
#: what ranks import, and what does not ask which rank it is in
PRELOAD = (
    "torch._dynamo",
    "aiscale.measure.study.grid",
    "aiscale.train.data",
    "aiscale.train.model",
    "aiscale.train.optimizer",
    "aiscale.train.sharded_checkpoint",
)
_ENDS = {
    128 + 14: "timed out",
    128 + 9: "out of memory",
}  #: by SIGALRM; Linux kills what needs too much memory


def run_study(study: Study, out: str | Path, budget_minutes: float | None = None) -> list[dict]:
    """Make the runs that the folder `out` lacks, until the budget is used up; returns all results.

    Progress goes to standard error. Raises ConfigError if `out` holds another study or cannot be
    written; then the finished runs are in it.
    """
    require_writable(out, "--out")
    rows, plan = load(out), list(turns(study))
    stored = {(row["round"], row["turn"]): row["settings"] for row in rows}
    if any(stored.get((number, turn), cell) != cell for number, turn, cell in plan):
        raise ConfigError(
            f"{out} holds results of another study than {study.name}: "
            "name another folder with --out"
        )
    waiting = [each for each in plan if each[:2] not in stored]
    minutes = budget_minutes or study.budget_minutes or math.inf
    deadline = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="aiscale-study-") as scratch:
        for i, (number, turn, cell) in enumerate(waiting):
            usual_s = max([row["seconds"] for row in rows if row["settings"] == cell], default=0)
            if time.monotonic() + usual_s > deadline:
                print(
                    f"{minutes:g} minutes are used up, {len(waiting) - i} runs are left: "
                    "run it again",
                    file=sys.stderr,
                )
                break
            rows.append(row := {"round": number, "turn": turn, **_run(study, cell, Path(scratch))})
            Path(out).mkdir(parents=True, exist_ok=True)
            write_whole(Path(out, f"{number}-{turn:03}.json"), json.dumps(row, indent=1))
            how = f"{row['status']}, {row['seconds']} s {row['error']}"
            print(
                f"{i + 1} of {len(waiting)}, round {number + 1}: {row['cell']}: {how}",
                file=sys.stderr,
                flush=True,
            )
    return rows


def load(folder: str | Path) -> list[dict]:
    """The results of a folder, in the order of the runs."""
    rows = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    return sorted(rows, key=lambda row: (row["round"], row["turn"]))


def turns(study: Study) -> Iterator[tuple[int, int, Cell]]:
    """(round, turn, cell) of all runs: the base, the cells shuffled, the base after every few."""
    for number in range(study.repeats):
        cells = list(study.cells)
        random.Random(f"1 {number}").shuffle(cells)  # the same each time, so that the study resumes
        order = [study.base]
        for i, cell in enumerate(cells, 1):
            order += [cell] + [study.base] * (i % BASE_EVERY == 0 or i == len(cells))
        yield from ((number, turn, cell) for turn, cell in enumerate(order))


def _run(study: Study, cell: Cell, scratch: Path) -> dict:
    """The result of one run."""
    started, load_before = time.perf_counter(), os.getloadavg()[0]
    return {
        **{
            "study": study.name,
            "cell": study.label(cell),
            "settings": cell,
            "status": "ok",
            "error": "",
        },
        **_predicted(cell),
        **attempt(study, cell, scratch),
        **{"date": datetime.now(UTC).isoformat(timespec="seconds"), "load": round(load_before, 2)},
        "seconds": round(time.perf_counter() - started, 2),
    }


def attempt(study: Study, cell: Cell, scratch: Path, script: Path | None = None) -> dict:
    """What the ranks of this cell measured, or the status and the error that ended them.

    `script` runs in place of the trainer of the cell's strategy.
    """
    if script is None:
        script = INFERENCE if cell["phase"] == "inference" else TRAIN / f"{trainer_of(cell)}.py"
    if cell["place"] == "memory" and not IN_MEMORY.is_dir():
        return {"status": "failed", "error": f"place memory needs {IN_MEMORY}, which is not here"}
    disk = IN_MEMORY if cell["place"] == "memory" else scratch
    with (
        tempfile.TemporaryDirectory(dir=scratch) as out,
        tempfile.TemporaryDirectory(prefix="aiscale-study-", dir=disk) as data,
    ):
        text, spec = Path(data, "text"), Path(out, "spec.json")
        _write_text(cell["text"], cell["data_kib"] * 1024 + 1, text)
        if (vocabulary := shape_of(cell["size"]).vocabulary) < 256:
            text = _write_tokens(text.read_bytes(), vocabulary, Path(data, "tokens"))
        limit_s, epoch = 60 * study.cell_minutes, epoch_of(cell)
        what = {"out": out, "epoch": epoch, "precision": cell["precision"], "limit_s": limit_s}
        spec.write_text(json.dumps(what))
        where = {"steps": WARM_UP + 2 * epoch, "text": text, "save": f"{out}/run", "save_every": 0}
        if trainer_of(cell) == "zero":
            where = {"config": _deepspeed_json(cell, Path(out))} | where
        words = words_of(where | options_of(cell))
        argv = ["-m", "aiscale.measure.study.cell", str(spec), str(script), *words]
        status = launch(cell["ranks"], argv, preload=PRELOAD)
        if status in INTERRUPTED:
            raise KeyboardInterrupt
        found = [json.loads(file.read_text()) for file in sorted(Path(out).glob("[0-9]*.json"))]
    return _together(found, cell, status)


def _deepspeed_json(cell: Cell, folder: Path) -> Path:
    """The trainer's settings of DeepSpeed, with sizes for this model.

    Its defaults are for billions of parameters: it would reserve buckets larger than a small model,
    and never shard it.
    """
    model, settings = run_of(cell).model, json.loads((TRAIN / "ds_config.json").read_text())
    if isinstance(model, ModelConfig):
        largest = max(sum(cost.layer_parameters(model).values()), model.vocab_size * model.d_model)
        # An even number: 16-bit messages are aligned to 4 bytes.
        bucket = min(500_000_000, 2 * math.ceil(largest / 2))
        settings["zero_optimization"] |= {
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "sub_group_size": min(cost.parameter_count(model), 1_000_000_000),  # updated at once
            "stage3_param_persistence_threshold": 0,  # shard the small tensors, too
            "stage3_max_live_parameters": 0,  # free each layer's weights after it has used them
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        }
    if cell["strategy"].endswith("-offload"):
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        settings["zero_force_ds_cpu_optimizer"] = False  # torch's AdamW updates there
    file = folder / "ds_config.json"
    file.write_text(json.dumps(settings))
    return file


def _together(found: list[dict], cell: Cell, status: int) -> dict:
    """Of what the ranks wrote: means over ranks, the largest peak; or why they failed."""
    failed = [rank for rank in found if "status" in rank]
    # One that was killed, or lacks memory, explains the others' broken connections.
    if failed and status not in _ENDS:
        return max(failed, key=lambda rank: rank["status"] == "out of memory")
    if status or len(found) < cell["ranks"]:
        error = f"a rank ended with status {status}"
        return {"status": _ENDS.get(status, "failed"), "error": error}
    mean = {}
    for name in ("first_epoch_s", "epoch_s"):
        mean[name] = statistics.fmean(rank[name] for rank in found)
    chosen = options_of(cell)
    tokens = epoch_of(cell) * chosen["batch"] * chosen["length"]
    mean["tokens_per_s"] = tokens / mean["epoch_s"]
    mean["peak_bytes"] = max(rank["peak_bytes"] for rank in found)
    return {**found[0], **mean, "commit": _commit()}


def _commit() -> str | None:
    """Of this repository, where the package lies in one."""
    command = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty"]
    git = subprocess.run(command, capture_output=True, text=True)
    return git.stdout.strip() or None


def _predicted(cell: Cell) -> dict:
    """Parameters and the bytes of a training step, from `cost`; nothing where it has no formula."""
    run, ranks = run_of(cell), cell["ranks"]
    if not isinstance(run.model, ModelConfig) or cell["phase"] != "training":
        return {}
    if cell["strategy"].endswith("-offload"):  # the formulas count one memory
        return {"parameters": cost.parameter_count(run.model)}
    each = [sum(cost.step_bytes(run, ranks, rank).values()) for rank in range(ranks)]
    return {"parameters": cost.parameter_count(run.model), "predicted_bytes": max(each)}


def _write_text(corpus: str, nbytes: int, path: Path) -> None:
    """The first bytes of a corpus as 8-bit ASCII, as the report projected The Pile.

    The corpus is repeated if it is shorter.
    """
    from aiscale.train.prepare.corpus import find_text

    text, pieces = bytearray(), itertools.cycle(find_text(corpus))
    while len(text) < nbytes:
        text += next(pieces).encode("ascii", "replace")
    path.write_bytes(text[:nbytes])


def _write_tokens(text: bytes, vocabulary: int, folder: Path) -> Path:
    """Tokens for a model of less than 256: the commonest characters, and one for all others.

    A folder as `aiscale data prepare` makes it, of which the trainers read the vocabulary.
    """
    characters = np.frombuffer(text, np.uint8)
    commonest = np.argsort(-np.bincount(characters, minlength=256), kind="stable")
    numbers = np.empty(256, np.uint16)
    numbers[commonest] = np.minimum(np.arange(256), vocabulary - 1)
    tokens = numbers[characters].astype("<u2").tobytes()
    folder.mkdir()
    (folder / "tokens.bin").write_bytes(tokens)
    about = {"vocab_size": vocabulary, "tokens": len(characters)}
    about["sha256"] = hashlib.sha256(tokens).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(about))
    return folder
