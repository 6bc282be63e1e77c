"""A real browser, over Chromium's debugging protocol: pages of several people, their JavaScript.

with Browser(tmp_path) as browser:
    page = browser.page()                     # with its own cookies
    page.goto("http://127.0.0.1:8000")
    page.wait("document.querySelector('form')")
    page.press("Shift+Enter")                 # to what has the focus, as from a keyboard
    page.screenshot(path)
"""

from __future__ import annotations

import base64
import contextlib
import http.server
import itertools
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import websocket

_OPTIONS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-sync --disable-dev-shm-usage --disable-extensions --hide-scrollbars "
    "--remote-debugging-port=0"
)

_KEY_CODES = {
    "Tab": 9,
    "Enter": 13,
    "Escape": 27,
    "End": 35,
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}


def find_browser() -> str:
    """A Chromium on this machine; empty if there is none."""
    return next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
    )


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder, by a web server of this process."""
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Browser:
    def __init__(self, folder: Path, size: tuple[int, int] = (1280, 900)) -> None:
        self._profile = folder / "browser"
        self._profile.mkdir()
        command = [
            find_browser(),
            *_OPTIONS.split(),
            f"--user-data-dir={self._profile}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._size = size
        try:
            port, path = self._ports()
            self._port = port
            self._line = _Line(f"ws://127.0.0.1:{port}{path}")
        except BaseException:
            self._process.kill()
            raise

    def _ports(self, timeout_s: float = 60) -> list[str]:
        written, deadline = self._profile / "DevToolsActivePort", time.monotonic() + timeout_s
        while not (written.exists() and len(lines := written.read_text().split()) == 2):
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(f"chromium did not start (status {self._process.poll()})")
            time.sleep(0.1)
        return lines

    def page(self) -> Page:
        """A window of another person: it shares no cookies with the others."""
        context = self._line.call("Target.createBrowserContext")["browserContextId"]
        width, height = self._size
        made = self._line.call(
            "Target.createTarget",
            url="about:blank",
            browserContextId=context,
            width=width,
            height=height,
        )
        return Page(_Line(f"ws://127.0.0.1:{self._port}/devtools/page/{made['targetId']}"))

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Page:
    def __init__(self, line: _Line) -> None:
        self._line = line

    def goto(self, url: str) -> None:
        """Open an address; does not wait for the page to be complete."""
        self._line.call("Page.navigate", url=url)

    def evaluate(self, script: str):
        """The value of a JavaScript expression; a promise is awaited. RuntimeError if it throws."""
        done = self._line.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in done:
            about = done["exceptionDetails"]
            raise RuntimeError(about.get("exception", {}).get("description") or about["text"])
        return done["result"].get("value")

    def wait(self, condition: str, timeout_s: float = 120) -> None:
        deadline, why = time.monotonic() + timeout_s, ""
        while True:
            try:
                if self.evaluate(f"!!({condition})"):
                    return
            except RuntimeError as error:  # of a page that is still loading
                why = f" ({error})"
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{condition} did not become true{why}; the page says:\n{self.text()[-2000:]}"
                )
            time.sleep(0.2)

    def type(self, text: str) -> None:
        """Write text where the focus is, with Enter between lines."""
        for number, line in enumerate(text.splitlines()):
            if number:
                self.press("Enter")
            self._line.call("Input.insertText", text=line)

    def press(self, keys: str) -> None:
        """Press a key, such as End, a or Shift+Enter."""
        *held, key = keys.split("+")
        about = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": _KEY_CODES.get(key) or ord(key.upper()),
        }
        about["modifiers"] = sum({"Control": 2, "Shift": 8}[name] for name in held)
        down = {"text": "\r"} if keys == "Enter" else {}
        self._line.call("Emulation.setFocusEmulationEnabled", enabled=True)
        self._line.call(
            "Input.dispatchKeyEvent", type="keyDown" if down else "rawKeyDown", **about, **down
        )
        self._line.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def text(self) -> str:
        return self.evaluate("document.body ? document.body.innerText : ''") or ""

    def screenshot(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            base64.b64decode(self._line.call("Page.captureScreenshot", format="png")["data"])
        )
        return path


class _Line:
    """A connection on which calls are answered in order; events in between are ignored."""

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, timeout=60, suppress_origin=True)
        self._numbers = itertools.count(1)

    def call(self, method: str, **params) -> dict:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while (answer := json.loads(self._socket.recv())).get("id") != number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]
