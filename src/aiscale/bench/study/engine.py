"""Runs the cells of a study, each in new processes, and appends every result to a tidy CSV at once.

    rows = run_study(read_study("laptop"), "runs/laptop.csv", report=print)

Each round runs the cells in a new random order, with the base between them, so that a drift of the machine shows in
the base and can be divided out. The same call resumes: what the file holds is not run again. A cell that runs out of
memory, crashes or takes too long is a row with that status.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from aiscale import cost
from aiscale.bench.ranks import Report, silent
from aiscale.bench.study.grid import AXES, FACTS, Cell, Study, identity, run_of
from aiscale.bench.study.results import load
from aiscale.config import ConfigError, ModelConfig, remedy, require_writable

INTERRUPTED = 130  #: status of ranks after Ctrl-C
BASE_EVERY = 5  #: cells between two runs of the base
MEASURED = (
    *("first_epoch_s", "epoch_s", "slowest_rank_s", "step_s", "ready_s", "stage_s", "steps", "tokens_per_s"),
    *("peak_bytes", "held_bytes", "wire_bytes_per_step", "loss"),
)
COLUMNS = (
    *("study", "cell", "id", "round", "turn", "status", "error"),
    *(*AXES, "settings", "parameters", "predicted_bytes", "largest_layers", "predicted_layers", "limit_bytes"),
    *(*MEASURED, "load", "seconds", "date", *FACTS),
)


class Turn(NamedTuple):
    round: int
    turn: int
    cell: Cell
    limit_bytes: float | None  #: of a search; None: an ordinary cell


def run_study(
    study: Study, out: str | Path, *, budget_minutes: float | None = None, report: Report = silent
) -> list[dict]:
    """Make the runs that the file `out` lacks, until the budget is used up; returns all rows of the file.

    Raises ConfigError if `out` holds another study or cannot be written; then the finished cells are in it.
    """
    out = Path(out)
    require_writable(out.parent, "--out")
    rows = load(out) if out.exists() else []
    if other := next((row["study"] for row in rows if row["study"] != study.name), None):
        raise ConfigError(f"{out} holds results of study {other}, not {study.name}: name another file with --out")
    done = {(row["id"], row["round"], row["turn"]) for row in rows}
    waiting = [turn for turn in turns(study) if (_id(turn), turn.round, turn.turn) not in done]
    minutes = budget_minutes or study.budget_minutes
    deadline = time.monotonic() + 60 * minutes if minutes else math.inf
    with tempfile.TemporaryDirectory(prefix="aiscale-study-") as folder:
        for number, turn in enumerate(waiting):
            usual_s = max([float(row["seconds"]) for row in rows if row["id"] == _id(turn)], default=0.0)
            if time.monotonic() + usual_s > deadline:
                report(
                    f"the budget of {minutes:g} minutes is used up, {len(waiting) - number} runs are left: run it again"
                )
                break
            row = _run(study, turn, Path(folder))
            rows.append(row)
            _append(out, row)
            report(f"{number + 1} of {len(waiting)}, round {turn.round + 1}: {row['cell']}: {_said(row)}")
    return load(out) if out.exists() else []


def turns(study: Study) -> Iterator[Turn]:
    """All runs, in their order: in each round the base, the cells shuffled, and the base again after every few."""
    for number in range(study.repeats):
        cells = list(study.cells)
        random.Random(f"1 {number}").shuffle(cells)  # the same each time, so that the study resumes
        order = [study.base]
        for i, cell in enumerate(cells, 1):
            order += [cell] + [study.base] * (i % BASE_EVERY == 0 or i == len(cells))
        yield from (Turn(number, place, cell, None) for place, cell in enumerate(order))
    for place, (cell, limit) in enumerate(study.largest):
        yield Turn(study.repeats, place, cell, limit)


def _id(turn: Turn) -> str:
    return identity(turn.cell) if turn.limit_bytes is None else f"{identity(turn.cell)}-{turn.limit_bytes / 2**20:g}"


def _run(study: Study, turn: Turn, folder: Path) -> dict:
    """The row of one run."""
    started, load_before = time.perf_counter(), os.getloadavg()[0]
    if turn.limit_bytes is not None:
        cell, found = _largest(study, turn, folder)
        label = f"largest in {turn.limit_bytes / 2**20:g} MiB, {study.label({**turn.cell, 'size': study.base['size']})}"
    else:
        cell, label = turn.cell, study.label(turn.cell)
        limit = study.memory_limit_mib and study.memory_limit_mib * 2**20
        found = {"status": "ok", "limit_bytes": limit or ""} | attempt(study, cell, folder, limit)
    more = {key: value for key, value in cell.items() if key not in AXES}
    row = {
        **{"study": study.name, "cell": label, "id": _id(turn), "round": turn.round, "turn": turn.turn},
        **{axis: cell[axis] for axis in AXES},
        **{"settings": json.dumps(more) if more else "", **_predicted(cell), **found},
        **{"load": round(load_before, 2), "seconds": round(time.perf_counter() - started, 2)},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return {column: row.get(column, "") for column in COLUMNS}


def attempt(study: Study, cell: Cell, folder: Path, limit: float | None, probe: bool = False) -> dict:
    """What the ranks of this cell measured, or the status and the error that ended them."""
    from aiscale.distributed import launch  # loads torch, which a study without a run left does not need
    from aiscale.parallel import preload

    data = folder / f"{cell['data_kib']}.bytes"
    if not data.exists():
        _write_text(run_of(cell).data.corpus, int(cell["data_kib"]) * 1024, data)
    spec, out = folder / "spec.json", folder / "out.json"
    settings = {"cell": cell, "data": str(data), "limit_bytes": limit, "probe": probe}
    spec.write_text(json.dumps({**settings, "limit_s": 60 * study.cell_minutes}))
    for old in folder.glob("out.json*"):
        old.unlink()
    argv = ["-m", "aiscale.bench.study.cell", str(spec), str(out)]
    status = launch(int(cell["ranks"]), argv, warm_up=functools.partial(preload, "ddp"))
    failed = Path(f"{out}.failed")
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status == 0 and out.exists():
        return json.loads(out.read_text())
    if failed.exists():
        why = json.loads(failed.read_text())
        return {"status": why["status"], "error": " ".join(why["error"].split())[:300]}
    if status == 128 + 14:  # SIGALRM
        return {"status": "timed out", "error": f"not done in {study.cell_minutes:g} minutes"}
    killed = " (killed: the system's memory may have run out)" * (status == 128 + 9)
    return {"status": "out of memory" if killed else "failed", "error": f"a rank ended with status {status}{killed}"}


def _largest(study: Study, turn: Turn, folder: Path) -> tuple[Cell, dict]:
    """Search the most layers whose step stays below the limit, by doubling and halving; and predict them."""
    start, width = (int(part) for part in str(turn.cell["size"]).split("x"))  # a pipeline's stages divide the layers
    peaks: dict[int, float] = {}

    def fits(layers: int) -> bool:
        cell = {**turn.cell, "size": f"{layers}x{width}"}
        peaks[layers] = attempt(study, cell, folder, turn.limit_bytes, True).get("peak_bytes", math.inf)
        return peaks[layers] <= turn.limit_bytes

    def predicted_fits(layers: int) -> bool:
        nbytes = _predicted({**turn.cell, "size": f"{layers}x{width}"})["predicted_bytes"]
        return nbytes != "" and nbytes <= turn.limit_bytes

    most = _most(fits, start)
    cell = {**turn.cell, "size": f"{max(most, start)}x{width}"}
    found = {"largest_layers": most, "predicted_layers": _most(predicted_fits, start), "limit_bytes": turn.limit_bytes}
    if not most:
        return cell, {**found, "status": "out of memory", "error": f"not even {start} layers fit"}
    return cell, {**found, "status": "ok", "peak_bytes": peaks[most]}


def _most(fits: Callable[[int], bool], unit: int) -> int:
    """The largest multiple of `unit` that fits, 0 if none does."""
    if not fits(unit):
        return 0
    low, high = 1, 2
    while high < 4096 and fits(high * unit):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * unit) else (low, middle)
    return low * unit


def _predicted(cell: Cell) -> dict:
    """Parameters and the bytes of a training step, from `cost`; empty where it has no formula."""
    run, ranks = run_of(cell), int(cell["ranks"])
    if not isinstance(run.model, ModelConfig) or cell["model"] != "gpt":
        return {"parameters": "", "predicted_bytes": ""}
    nbytes = max(sum(cost.step_bytes(run, ranks, rank).values()) for rank in range(ranks))
    trains = cell["phase"] == "training"
    return {"parameters": cost.parameter_count(run.model), "predicted_bytes": nbytes if trains else ""}


# Files ---------------------------------------------------------------------------------------------------------------


def _write_text(corpus: str, nbytes: int, path: Path) -> None:
    """The first bytes of a corpus as 8-bit ASCII, as the report projected The Pile; repeated if it is shorter."""
    from aiscale.data.corpus import find_text  # loads torch, which a study without a run left does not need

    buffer = io.BytesIO()
    while buffer.tell() < nbytes:
        before = buffer.tell()
        for piece in find_text(corpus).pieces():
            buffer.write(piece.encode("ascii", "replace"))
            if buffer.tell() >= nbytes:
                break
        if buffer.tell() == before:
            raise ConfigError(f"study: corpus {corpus} is empty")
    path.write_bytes(buffer.getvalue()[:nbytes])


def _append(out: Path, row: dict) -> None:
    """Append a row and fsync it. If the disk is full, what is there stays whole."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("ab+", buffering=0) as file:  # a buffer would be written once more when the file is closed
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        torn = file.read(1) not in (b"", b"\n")
        if not end:
            writer.writeheader()
        writer.writerow(row)
        data = b"\n" * torn + text.getvalue().encode()
        try:
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        except OSError as error:
            os.truncate(out, end)
            why = f"{out} cannot be written ({error.strerror}): {remedy(error, '--out')}; its finished cells are kept"
            raise ConfigError(why) from None


def _said(row: dict) -> str:
    if row["status"] != "ok":
        return f"{row['status']}: {row['error']}"
    if row["largest_layers"] != "":
        return f"{row['largest_layers']} layers (predicted: {row['predicted_layers']})"
    return f"{row['epoch_s']:.3f} s an epoch, {row['peak_bytes'] / 2**20:.1f} MiB"
