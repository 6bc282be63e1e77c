"""The planner in a browser tab: a page of sliders, in which Pyodide runs this same package.

    aiscale plan --page build/planner
    python -m http.server --directory build/planner        # any web server will do; nothing is asked of other hosts

`choices`, `ask` and `pipeline` are what the page calls; they run here as well, and a test compares both. Pyodide comes
from npm once (14 MB), or from a folder that AISCALE_PYODIDE names.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

from aiscale.config import ConfigError, require_writable
from aiscale.machines import MACHINES
from aiscale.plan import command
from aiscale.plan.answer import simulate
from aiscale.plan.hardware import platform_of
from aiscale.recipes import RECIPES

PYODIDE = "314.0.7"  #: Python 3.14
FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "pyodide-lock.json", "python_stdlib.zip")
ROOMS = ("config", "recipes", "machines", "cost", "plan")
MOST_EVENTS = 4000  #: of a pipeline: more cannot be told apart on a screen


# what the page calls -------------------------------------------------------------------------------------------------


def choices() -> str:
    """JSON of the models and machines that can be planned."""
    models = {}
    for name in (*command.SHAPES, *RECIPES):
        with contextlib.suppress(ConfigError):
            args = _args(["--model", name])
            shape = command.find_shape(args)
            models[name] = {"billions": shape.parameters / 1e9, "batch": command.batch_of(args), "seq": shape.seq}
    machines = {
        name: {
            "nodes": machine.nodes or 1024,
            "devices": machine.node.devices,
            "accelerator": machine.node.accelerator.name,
        }
        for name, machine in MACHINES.items()
    }
    return json.dumps({"models": models, "machines": machines})


def ask(*argv: str) -> str:
    """What `aiscale plan ARGV --json` prints, or {"error": its line}."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            command.run(_args([*argv, "--json"]))
    except ConfigError as error:
        return json.dumps({"error": str(error)})
    return printed.getvalue()


def pipeline(*argv: str) -> str:
    """JSON of the simulated pipeline of a layout: {"total_s", "events": [[rank, kind, start, end], ...]}."""
    args = _args(list(argv))
    platform = platform_of(command.find_machine(args.machine))
    shape = command.find_shape(args)
    answer, _ = command.choose(args, shape, platform, command.batch_of(args))
    layout = answer.layout
    if 2 * layout.pp * layout.virtual_stages * layout.micro_batches > MOST_EVENTS:
        return json.dumps({"events": [], "micro_batches": layout.micro_batches})
    run = simulate(shape, layout, platform)
    events = [[event.rank, event.kind, event.start_s, event.end_s] for event in run]
    total_s = max(event.end_s for event in run)
    return json.dumps({"total_s": total_s, "events": events, "micro_batches": layout.micro_batches})


def _args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    command.add_arguments(parser)
    try:
        return parser.parse_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None


# the folder ----------------------------------------------------------------------------------------------------------


def write_page(out: Path) -> str:
    """Write the page, the package and Pyodide to a folder; returns a line that says how to open it."""
    require_writable(out, "--page")
    out.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).parent
    with zipfile.ZipFile(out / "aiscale.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("aiscale/__init__.py", "")
        for file in sorted(file for room in ROOMS for file in (here.parent / room).rglob("*.*")):
            if file.suffix in (".py", ".toml"):
                archive.writestr(str(file.relative_to(here.parents[1])), file.read_bytes())
    shutil.copyfile(here / "page.html", out / "index.html")
    if not all((out / name).exists() for name in FILES):
        _fetch_pyodide(out)
    return f"{out / 'index.html'}: open it through a web server, such as python -m http.server --directory {out}"


def _fetch_pyodide(out: Path) -> None:
    """Copy Pyodide's files from AISCALE_PYODIDE, or from npm's package."""
    given = os.environ.get("AISCALE_PYODIDE")
    if given:
        missing = [name for name in FILES if not (Path(given) / name).exists()]
        if missing:
            raise ConfigError(f"AISCALE_PYODIDE is {given}, where {', '.join(missing)} is missing: unpack it there")
        for name in FILES:
            shutil.copyfile(Path(given) / name, out / name)
        return
    npm = shutil.which("npm")
    if not npm:
        raise ConfigError(
            "the page needs Pyodide, and there is no npm to fetch it: install npm, or unpack npm's package "
            f"pyodide {PYODIDE} somewhere and name the folder in AISCALE_PYODIDE"
        )
    with tempfile.TemporaryDirectory() as folder:
        pack = [npm, "pack", "--silent", f"pyodide@{PYODIDE}"]
        done = subprocess.run(pack, cwd=folder, capture_output=True, text=True, timeout=300)
        found = list(Path(folder).glob("pyodide-*.tgz"))
        if done.returncode or not found:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            raise ConfigError(f"npm pack pyodide@{PYODIDE} failed ({last}): try again, or set AISCALE_PYODIDE")
        with tarfile.open(found[0]) as archive:
            for name in FILES:
                source = archive.extractfile(f"package/{name}")
                (out / name).write_bytes(source.read())
