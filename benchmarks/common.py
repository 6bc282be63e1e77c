"""What the benchmarks share: fair timing, the facts of a machine, tables with targets, and ranks.

Contenders take turns, and their ratio is taken round by round: two programs that run one after the
other see two different machines, since another job starts or the processor warms up. The result is
the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
import torch

from aiscale.launch import launch
from aiscale.measure.distributed import connect
from aiscale.train import record
from aiscale.train.prepare.corpus import find_text

_CPUS = Path("/proc/cpuinfo")
#: whether the processor multiplies bf16 itself (Linux only); without that, bf16 is slower than fp32
HAS_BF16 = _CPUS.exists() and not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(
    _CPUS.read_text().split()
)
#: Share of a step that the all-reduce takes in Radius' published baseline: seconds, a fit of its
#: table 2.
SHARE = 0.9 / 1.855


@dataclass(frozen=True, kw_only=True)
class Paired:
    seconds: dict[str, list[float]]

    def median_s(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, base: str) -> float:
        """How many times as long as `base` it takes: the median of the rounds' ratios."""
        return statistics.median(self.ratios(name, base))

    def ratios(self, name: str, base: str) -> list[float]:
        return [a / b for a, b in zip(self.seconds[name], self.seconds[base], strict=True)]


def paired(contenders: dict[str, Callable[[], object]], rounds: int, *, warmup: int = 1) -> Paired:
    """Run all contenders in turn, `rounds` times, forwards and backwards.
    The first `warmup` rounds, in which caches fill and libraries load, do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for round_index in range(-warmup, rounds):
        for name in list(contenders) if round_index % 2 == 0 else list(reversed(contenders)):
            start = time.perf_counter()
            contenders[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if round_index >= 0:
                seconds[name].append(time.perf_counter() - start)
    return Paired(seconds=seconds)


def machine_facts() -> dict:
    """Machine and versions of a measurement."""
    here, installed = record.machine(), record.versions()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "processor": here["processor"],
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "bf16_instructions": HAS_BF16,
        "system": here["system"],
        "python": installed["python"],
        "torch": torch.__version__,
        "transformers": installed.get("transformers"),
        "threads": here["threads_per_rank"],
        "load_average": round(os.getloadavg()[0], 2),
    }


def text_of(folder: Path) -> Path:
    """Python's own sources as one file."""
    file = folder / "stdlib.txt"
    if not file.exists():
        part = file.with_suffix(".part")
        with part.open("w", encoding="utf-8") as out:
            out.writelines(find_text("stdlib"))
        part.rename(file)
    return file


def on_ranks(
    n: int, script: str, *arguments: object, start: Callable[[int, Sequence[str]], int] = launch
) -> dict:
    """What `answer(...)` of `script` gets on n new ranks, each `python SCRIPT --rank ...`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        if status := start(n, [script, "--rank", str(out), json.dumps(arguments)]):
            raise SystemExit(
                f"the ranks of {Path(script).name} ended with status {status}; "
                "the reason is printed above"
            )
        return json.loads(out.read_text())


def as_rank(measure: Callable[..., dict]) -> None:
    """In a rank of `on_ranks`: measure(world, *arguments); rank 0 hands back the result."""
    _, out, arguments = sys.argv[1:]
    world = connect("cpu")
    result = measure(world, *json.loads(arguments))
    if world.is_main:
        Path(out).write_text(json.dumps(result))
    world.close()


def check(name: str, value: float, target: float, *, at_most: bool = True) -> dict:
    """Compare a value with its target: {name, value, target, at_most, met}."""
    met = value <= target if at_most else value >= target
    return {"name": name, "value": value, "target": target, "at_most": at_most, "met": met}


def arguments(script_doc: str) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        description=script_doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="measure less and shorter, without checks: a trial"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def finish(result: dict, show: Callable[[dict], None], as_json: bool) -> int:
    """Print the result and its checks; 0 if all are met."""
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        print(*(f"{key} {value}" for key, value in result["machine"].items()), sep=", ")
        show(result)
        rows = []
        for each in result["checks"]:
            target = f"{'at most' if each['at_most'] else 'at least'} {each['target']:g}"
            rows.append(
                (each["name"], f"{each['value']:.3f}", target, "met" if each["met"] else "MISSED")
            )
        table("targets", ("", "measured", "target", ""), rows)
    return 0 if all(each["met"] for each in result["checks"]) else 1


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, if it has rows; without a terminal, wide enough that no number wraps."""
    from rich.console import Console  # only here: a machine that writes JSON may lack it
    from rich.table import Table

    grid = Table(*heads, title=title, title_justify="left")
    for row in rows:
        grid.add_row(*row)
    if grid.row_count:
        Console(width=None if sys.stdout.isatty() else 140).print(grid)
