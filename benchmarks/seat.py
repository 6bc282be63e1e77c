"""The memory of a participant's seat: in each lesson the most that kernel, ranks and graders hold.

    python benchmarks/seat.py                              # 00 to 14 take half an hour
    python benchmarks/seat.py 05 07 --out src/aiscale/plan/published/measured/seat.json

A lesson runs by `aiscale notebooks --core --solved`, so that the referee starts the scripts of all
gaps. Four times a second the proportional set sizes (PSS) of its processes are added: a page that n
processes share counts as 1/n in each of them. The runner itself is left out. In its place a
participant has JupyterLab's server, which is measured without a page. `--out` puts the rows of
these lessons into a file, whose other rows stay.

Linux alone has PSS. Other programs of the same environment take a share of its libraries' pages:
measure while none runs. Load does not matter.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from common import arguments, check, finish, machine_facts, table

from aiscale import lesson
from aiscale.processes import kill_marked, marked, pss_bytes

GIB = 2**30
PROGRAMS = Path(sys.executable).parent
MARK = "AISCALE_SEAT"  #: all processes of a lesson inherit this variable
INTERVAL_S = 0.25
SERVER_S = 60  #: after which a server that is used by nobody holds what it needs
MOST_GIB = {"07_3d_parallelism": 2.5}
USUAL_GIB = 2.0


def watched(command: list, cwd: Path, limit_s: float = math.inf, leave_out: bool = True) -> dict:
    """Run a command until it ends, or for `limit_s`: the most that its processes held at once.

    `leave_out`: without the first process.
    """
    mark = uuid.uuid4().hex
    env = os.environ | {MARK: mark}
    began = time.monotonic()
    most = {"peak_bytes": 0, "processes": 0, "at_s": 0.0}
    with tempfile.TemporaryFile() as output:
        first = subprocess.Popen(command, cwd=cwd, env=env, stdout=output, stderr=output)
        try:
            while first.poll() is None and time.monotonic() - began < limit_s:
                pids = [pid for pid in marked(MARK, mark) if not (leave_out and pid == first.pid)]
                held_bytes = sum(map(pss_bytes, pids))
                if held_bytes > most["peak_bytes"]:
                    at_s = round(time.monotonic() - began, 1)
                    most = {"peak_bytes": held_bytes, "processes": len(pids), "at_s": at_s}
                time.sleep(INTERVAL_S)
        finally:
            kill_marked(MARK, mark)
        if first.wait() > 0:
            output.seek(0)
            raise SystemExit(output.read().decode(errors="replace"))
    return most


def server() -> dict:
    """JupyterLab's server, of which no page is open."""
    with tempfile.TemporaryDirectory() as folder:
        command = [PROGRAMS / "jupyter-lab", "--no-browser", "--allow-root"]
        command += ["--ServerApp.ip=127.0.0.1", "--ServerApp.port=0"]
        return watched(command, Path(folder), limit_s=SERVER_S, leave_out=False)


def seat(notebook: lesson.Notebook) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        command = [PROGRAMS / "aiscale", "notebooks", notebook.name]
        command += ["--core", "--solved", "--out", folder]
        facts = machine_facts()
        measured = {"lesson": notebook.name, "date": facts["date"], "command": facts["command"]}
        return measured | watched(command, Path.cwd())


def show(result: dict) -> None:
    rows = [
        (each["lesson"], f"{each['peak_bytes'] / GIB:.2f}", str(each["processes"]))
        for each in result["lessons"]
    ]
    rows.append(("JupyterLab's server", f"{result['server']['peak_bytes'] / GIB:.2f}", ""))
    table("most memory at once", ("", "GiB", "processes"), rows)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("names", nargs="*", metavar="LESSON", help="default: 00 to 14")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the rows in this file")
    args = parser.parse_args()
    if not Path("/proc/self/smaps_rollup").exists():
        raise SystemExit("this machine has no /proc/PID/smaps_rollup: PSS is known on Linux alone")
    names = args.names or (["00"] if args.quick else [])
    chosen = [each for each in lesson.notebooks(names) if not each.is_appendix]
    result = {"machine": machine_facts(), "server": server(), "lessons": []}
    result["lessons"] = [seat(notebook) for notebook in chosen]
    if args.out:
        kept = json.loads(args.out.read_text())["lessons"] if args.out.exists() else []
        rows = {row["lesson"]: row for row in [*kept, *result["lessons"]]}
        result["lessons"] = [rows[name] for name in sorted(rows)]
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    result["checks"] = []
    for each in [] if args.quick else result["lessons"]:
        most_gib = MOST_GIB.get(each["lesson"], USUAL_GIB)
        result["checks"].append(check(each["lesson"], each["peak_bytes"] / GIB, most_gib))
    return finish(result, show, args.json)


if __name__ == "__main__":
    sys.exit(main())
