"""The planner in a browser tab: a page of sliders, in which Pyodide runs this same package.

The page calls `choices`, `ask` and `judge`; they run here as well, and a test compares both.
Pyodide comes from npm (14 MB).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

from aiscale.errors import ConfigError, require_writable
from aiscale.plan import command
from aiscale.plan.constants import SCOREBOARD
from aiscale.plan.machines import MACHINES
from aiscale.plan.presets import TABLE, presets
from aiscale.plan.tasks import TASKS

PYODIDE = "314.0.7"  #: Python 3.14
FILES = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "pyodide-lock.json",
    "python_stdlib.zip",
)
#: The planner reads no tables of these.
LEFT_OUT = "published"


def choices() -> str:
    """JSON of the models and machines that can be planned, the scoreboard's lines, the tasks."""
    models = {}
    for name in (*command.SHAPES, *presets()):
        with contextlib.suppress(ConfigError):
            args = _args(["--model", name])
            shape = command.find_shape(args)
            models[name] = {
                "billions": shape.parameters / 1e9,
                "batch": command.batch_of(args),
                "seq": shape.seq,
                "experts": shape.experts,
            }
    machines = {}
    for name, machine in MACHINES.items():
        node = machine.node
        machines[name] = {
            "nodes": machine.nodes or 1024,
            "devices": node.devices,
            "accelerator": node.accelerator.name,
        }
    return json.dumps(
        {
            "models": models,
            "machines": machines,
            "scoreboard": SCOREBOARD["lines"],
            "tasks": {name: task.to_dict() for name, task in TASKS.items()},
        }
    )


def judge(task: str, plan: str) -> str:
    """JSON of the rules of a task: [rule, whether this answer of `ask` meets it, what it has]."""
    return json.dumps(TASKS[task].judge(json.loads(plan)))


def ask(*argv: str) -> str:
    """What `aiscale plan ARGV --json` prints, or {"error": its line}."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            command.run(_args([*argv, "--json"]))
    except ConfigError as error:
        return json.dumps({"error": str(error)})
    return printed.getvalue()


def _args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    command.add_arguments(parser)
    try:
        return parser.parse_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None


def write_page(out: Path) -> str:
    """Write the page, the package and Pyodide to a folder; returns a line on how to open it."""
    require_writable(out, "--page")
    out.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).parent
    with zipfile.ZipFile(out / "aiscale.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("aiscale/__init__.py", "")
        archive.writestr(f"aiscale/{TABLE.name}", TABLE.read_bytes())
        for file in [here.parent / "errors.py", *sorted(here.rglob("*.*"))]:
            if file.suffix in (".py", ".toml") and LEFT_OUT not in file.parts:
                archive.writestr(str(file.relative_to(here.parents[1])), file.read_bytes())
    shutil.copyfile(here / "page.html", out / "index.html")
    fetch_pyodide(out)
    return (
        f"{out / 'index.html'}: open it through a web server, "
        f"such as python -m http.server --directory {out}"
    )


def fetch_pyodide(out: Path) -> None:
    """Pyodide's files, from npm's package, if a folder lacks them."""
    if all((out / name).exists() for name in FILES):
        return
    if not shutil.which("npm"):
        raise ConfigError(
            f"the page needs Pyodide {PYODIDE}, and there is no npm to fetch it: "
            f"install npm, or copy {', '.join(FILES)} to {out}, from npm's package pyodide"
        )
    with tempfile.TemporaryDirectory() as folder:
        pack = ["npm", "pack", "--silent", f"pyodide@{PYODIDE}"]
        subprocess.run(pack, cwd=folder, stdout=subprocess.DEVNULL, check=True, timeout=300)
        shutil.unpack_archive(next(Path(folder).glob("pyodide-*.tgz")), folder, filter="data")
        for name in FILES:
            shutil.copyfile(Path(folder, "package", name), out / name)
