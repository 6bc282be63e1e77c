"""Runs the cells of a study, each in new processes, and writes each result to a file of its own at once.

Each round runs the cells in a new random order, with the base between them, so that a drift of the machine shows in
the base and can be divided out. The same call resumes: a run whose file exists is not made again. A cell that runs out
of memory, crashes or takes too long is a result with that status.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from aiscale import cost
from aiscale.config import ConfigError, ModelConfig, require_writable, write_whole
from aiscale.launch import launch
from aiscale.study.grid import Cell, Study, run_of

BASE_EVERY = 5  #: cells between two runs of the base
INTERRUPTED = (130, 128 + 15)  #: statuses of ranks after Ctrl-C and SIGTERM
_ENDS = {128 + 14: "timed out", 128 + 9: "out of memory"}  #: by SIGALRM; Linux kills what needs too much memory


def run_study(study: Study, out: str | Path, budget_minutes: float | None = None) -> list[dict]:
    """Make the runs that the folder `out` lacks, until the budget is used up; returns the results of all. Progress goes
    to standard error.

    Raises ConfigError if `out` holds another study or cannot be written; then the finished runs are in it.
    """
    require_writable(out, "--out")
    rows, plan = load(out), list(turns(study))
    stored = {(row["round"], row["turn"]): row["settings"] for row in rows}
    if any(stored.get((number, turn), cell) != cell for number, turn, cell in plan):
        raise ConfigError(f"{out} holds results of another study than {study.name}: name another folder with --out")
    waiting = [each for each in plan if each[:2] not in stored]
    minutes = budget_minutes or study.budget_minutes or math.inf
    deadline = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="aiscale-study-") as scratch:
        for i, (number, turn, cell) in enumerate(waiting):
            usual_s = max([row["seconds"] for row in rows if row["settings"] == cell], default=0)
            if time.monotonic() + usual_s > deadline:
                print(
                    f"{minutes:g} minutes are used up, {len(waiting) - i} runs are left: run it again", file=sys.stderr
                )
                break
            rows.append(row := {"round": number, "turn": turn, **_run(study, cell, Path(scratch))})
            Path(out).mkdir(parents=True, exist_ok=True)
            write_whole(Path(out, f"{number}-{turn:03}.json"), json.dumps(row, indent=1))
            how = f"{row['status']}, {row['seconds']} s {row['error']}"
            print(f"{i + 1} of {len(waiting)}, round {number + 1}: {row['cell']}: {how}", file=sys.stderr, flush=True)
    return rows


def load(folder: str | Path) -> list[dict]:
    """The results of a folder, in the order of the runs."""
    rows = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    return sorted(rows, key=lambda row: (row["round"], row["turn"]))


def turns(study: Study) -> Iterator[tuple[int, int, Cell]]:
    """(round, turn, cell) of all runs: in each round the base, the cells shuffled, and the base after every few."""
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
        **{"study": study.name, "cell": study.label(cell), "settings": cell, "status": "ok", "error": ""},
        **_predicted(cell),
        **attempt(study, cell, scratch),
        **{"date": datetime.now(UTC).isoformat(timespec="seconds"), "load": round(load_before, 2)},
        "seconds": round(time.perf_counter() - started, 2),
    }


def attempt(study: Study, cell: Cell, scratch: Path) -> dict:
    """What the ranks of this cell measured, or the status and the error that ended them."""
    data, spec, out = (scratch / name for name in (f"{cell['data_kib']}.bytes", "spec.json", "out.json"))
    if not data.exists():
        _write_text(run_of(cell).data.corpus, cell["data_kib"] * 1024, data)
    spec.write_text(json.dumps({"cell": cell, "data": str(data), "limit_s": 60 * study.cell_minutes}))
    out.unlink(missing_ok=True)
    argv = ["-m", "aiscale.study.cell", str(spec), str(out)]
    preload = ["torch._dynamo", "aiscale.data", "aiscale.parallel", "aiscale.train.records"]  # those of study.cell
    status = launch(cell["ranks"], argv, preload=preload)
    if status in INTERRUPTED:
        raise KeyboardInterrupt
    failed = {"status": _ENDS.get(status, "failed"), "error": f"a rank ended with status {status}"}
    return json.loads(out.read_text()) if out.exists() else failed


def _predicted(cell: Cell) -> dict:
    """Parameters and the bytes of a training step, from `cost`; nothing where it has no formula."""
    run, ranks = run_of(cell), cell["ranks"]
    if not isinstance(run.model, ModelConfig) or cell["phase"] != "training":
        return {}
    nbytes = max(sum(cost.step_bytes(run, ranks, rank).values()) for rank in range(ranks))
    return {"parameters": cost.parameter_count(run.model), "predicted_bytes": nbytes}


def _write_text(corpus: str, nbytes: int, path: Path) -> None:
    """The first bytes of a corpus as 8-bit ASCII, as the report projected The Pile; repeated if it is shorter."""
    from aiscale.data.corpus import find_text

    text, pieces = bytearray(), itertools.cycle(find_text(corpus).pieces())
    while len(text) < nbytes:
        text += next(pieces).encode("ascii", "replace")
    path.write_bytes(text[:nbytes])
