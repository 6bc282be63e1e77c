"""One rank of any training script, watched from outside.

    python -m aiscale.measure.referee.probe SETTINGS.json RANK script.py ARGUMENTS

`runs` starts it. The settings are those of its Job.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
import threading
import time
import traceback
from pathlib import Path

STUCK = 3  #: exit status of a rank that the referee has stopped


def main() -> None:
    settings, rank, script = (
        json.loads(Path(sys.argv[1]).read_text()),
        int(sys.argv[2]),
        sys.argv[3],
    )
    recorder = _watch(settings, rank)
    threading.Thread(target=_wait_for_stop, args=(recorder, script), daemon=True).start()
    atexit.register(recorder.finish, "script", None)
    sys.argv = sys.argv[3:]
    if settings["module"]:
        sys.path.insert(0, settings["started_in"])
        runpy.run_module(settings["module"], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        runpy.run_path(script, run_name="__main__")


def _watch(settings: dict, rank: int):
    from aiscale.measure import traffic
    from aiscale.measure.referee import (
        collectives,
        gradients,
        inputs,
        loaders,
        modules,
        optimizers,
        recorder,
        trace,
    )

    folder = Path(settings["folder"])
    seen = recorder.Recorder(folder, rank, settings["steps"], settings["bare"], settings["noise"])
    if settings["weights"]:
        seen.given_weights = trace.load(settings["weights"])
    if settings["batches"]:
        loaders.give_batches(Path(settings["batches"]))
    elif not seen.bare:
        loaders.keep_batches(seen)
    recorder.seed(rank)
    inputs.leave_out_dropout(seen)
    inputs.leave_out_compiling(seen)
    inputs.watch_losses(seen)
    optimizers.watch_optimizers(seen)
    if not seen.bare:
        seen.sent = seen.traffic.enter_context(traffic.count())
        inputs.watch_tokens(seen)
        inputs.watch_orders(seen)
        inputs.watch_prefetch(seen)
        modules.Watcher(seen).install()
        gradients.watch_clipping(seen)
        collectives.watch_collectives(seen, folder)
    return seen


def _wait_for_stop(recorder, script: str) -> None:
    """The referee writes this file when another rank has failed or time is up: say where this rank
    stands."""
    while not (recorder.folder / "stop").exists():
        time.sleep(0.2)
    frame = sys._current_frames()[threading.main_thread().ident]
    here = os.path.dirname(os.path.abspath(script))
    lines = [line for line in traceback.extract_stack(frame) if line.filename.startswith(here)]
    if lines:
        print(
            f"STUCK {Path(lines[-1].filename).name}:{lines[-1].lineno}: {lines[-1].line}",
            file=sys.stderr,
        )
    recorder.finish("stopped", STUCK)


if __name__ == "__main__":
    main()
