"""A participant in JupyterLab, in a real browser: wrong answer, hint, right answer, tick, card."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jupyterlab_server.config import get_page_config

from aiscale.lesson import workbooks
from browser import Browser, Page, find_browser

WORKSHOP = Path(__file__).parents[1] / "workshop"
LESSON = "03_ddp"
PICTURE = WORKSHOP.parent / "build/exercise.png"
CONTENT = "jupyterapp.shell.currentWidget.content"
KERNEL = "jupyterapp.shell.currentWidget.sessionContext.session.kernel"


@contextmanager
def jupyterlab(root: Path, home: Path) -> Iterator[str]:
    """JupyterLab over a folder, with settings of nobody; the address of its pages."""
    command = [
        Path(sys.executable).with_name("jupyter-lab"),
        "--no-browser",
        "--allow-root",
        "--ServerApp.port=0",
    ]
    command += [
        "--IdentityProvider.token=",
        "--LabApp.expose_app_in_browser=True",
        f"--ServerApp.root_dir={root}",
    ]
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JUPYTER", "AISCALE_"))
    }
    places = {f"JUPYTER_{kind}_DIR": str(home / kind) for kind in ("CONFIG", "DATA", "RUNTIME")}
    places |= {"JUPYTERLAB_SETTINGS_DIR": str(home), "JUPYTERLAB_WORKSPACES_DIR": str(home)}
    with (home / "log").open("wb") as log:
        server = subprocess.Popen(
            command, cwd=root, env=env | places, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield _address(server, home)
    finally:
        server.send_signal(signal.SIGTERM)  # ends its kernels, which end their ranks
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _address(server: subprocess.Popen, home: Path, timeout_s: float = 60) -> str:
    deadline = time.monotonic() + timeout_s
    while True:
        for file in (home / "RUNTIME").glob("jpserver-*.json"):
            if file.stat().st_size:
                return json.loads(file.read_text())["url"]
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"JupyterLab did not start:\n{(home / 'log').read_text()[-3000:]}")
        time.sleep(0.1)


class Person:
    """Somebody at the keyboard, with a notebook open."""

    def __init__(self, page: Page, cells: list[str]) -> None:
        self.page, self.cells = page, cells

    def go_to(self, text: str) -> None:
        """Into the code cell that begins with this, at its end."""
        self.at = next(i for i, source in enumerate(self.cells) if source.startswith(text))
        self.page.evaluate(
            f"void ({CONTENT}.activeCellIndex = {self.at}, {CONTENT}.mode = 'command')"
        )
        self.page.evaluate(f"{CONTENT}.scrollToItem({self.at})")
        self.page.evaluate(f"void ({CONTENT}.mode = 'edit')")
        editor = f"{CONTENT}.widgets[{self.at}].node.querySelector('.cm-content')"
        self.page.wait(f"{editor} && document.activeElement === {editor}")
        self.page.press("Control+End")

    def replace_line(self, text: str) -> None:
        """The last line of the cell, but for its indentation."""
        self.page.press("Shift+Home")
        self.page.type(text)

    def run(self, *sees: str) -> None:
        """Run the cell, and read what appears below it."""
        cell = f"{CONTENT}.widgets[{self.at}]"
        prompt = f"{cell}.node.querySelector('.jp-InputPrompt').textContent"
        before = self.page.evaluate(prompt)
        self.page.press("Shift+Enter")
        # it is [*]: while it runs
        self.page.wait(f"/[0-9]/.test({prompt}) && {prompt} !== {json.dumps(before)}")
        for text in sees:
            self.page.wait(f"{cell}.outputArea.node.innerText.includes({json.dumps(text)})")


def test_make_lab_and_the_hub_ask_nobody_whether_they_want_news(monkeypatch):
    configuration = WORKSHOP / "jupyter"
    for file in (WORKSHOP.parent / "Makefile", WORKSHOP / "jupyterhub_config.py"):
        assert "workshop/jupyter" in file.read_text() and "JUPYTER_CONFIG_PATH" in file.read_text()
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(configuration))
    disabled = get_page_config([])["disabledExtensions"]
    assert "@jupyterlab/apputils-extension:announcements" in disabled


@pytest.mark.extended
@pytest.mark.skipif(not find_browser(), reason="no chromium on this machine")
def test_a_participant_answers_wrongly_reads_a_hint_answers_rightly_and_sees_the_card(tmp_path):
    root, home = tmp_path / "class", tmp_path / "home"
    home.mkdir()
    for folder in ("exercises", "graders"):  # as `make class` gives it: without solutions
        shutil.copytree(WORKSHOP / folder, root / "workshop" / folder)
    cells = [
        "".join(c["source"])
        for c in json.loads((WORKSHOP / f"exercises/{LESSON}.ipynb").read_text())["cells"]
    ]
    _, task = workbooks.find("03.1")
    message, wrong = next(
        (message, source) for _, message, source in task.refused if "\n" not in source
    )
    with jupyterlab(root, home) as address, Browser(tmp_path) as browser:
        page = browser.page()
        page.goto(f"{address}lab/tree/workshop/exercises/{LESSON}.ipynb")
        page.wait(f"{KERNEL}.status == 'idle'")
        person = Person(page, cells)
        for setup in ("from aiscale", "%%px\nfrom torch"):
            person.go_to(setup)
            person.run()
        person.go_to("%%px\ndef average_unequal")
        person.replace_line(wrong)
        person.run()
        person.go_to('check("03.1")')
        person.run("03.1: not yet", message)
        person.go_to('check("03.1")')
        person.replace_line('check("03.1", hint=1)')
        person.run(f"Hint 1 of {len(task.hints)}: {task.hints[0]}")
        person.go_to("%%px\ndef average_unequal")
        person.replace_line(workbooks.solution_of(LESSON, "03.1"))
        person.run()
        person.go_to('check("03.1")')
        person.replace_line('check("03.1")')
        person.run("03.1: ✓ right")
        person.go_to("ranks.stop()")
        person.run("1 of 1 exercises and gaps that you came by are done")
        page.screenshot(PICTURE)
    card = json.loads((root / "progress/card.json").read_text())
    kept = card["lessons"][LESSON]["exercises"]["03.1"]
    assert (kept["state"], kept["tries"], kept["hints"], kept["solution"]) == ("right", 2, 1, False)
