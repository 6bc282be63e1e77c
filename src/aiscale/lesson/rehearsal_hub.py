"""A class's hub, as the participants of a rehearsal use it (workshop/jupyterhub_config.py).

    hub = Hub("http://127.0.0.1:8000", class_password())
    token = hub.log_in("rehearsal-1")     # by the form, as a person does
    address = hub.start("rehearsal-1", token)
    hub.stop("rehearsal-1", token)

A hub whose people share a password: accounts of a machine cannot be made up.
"""

from __future__ import annotations

import http.cookiejar
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from aiscale.errors import require

LIMIT_S = 60  # for an answer
START_S = 300  # for a server, where others start too
RETRY_S = 1.0
_JSON = {"Content-Type": "application/json"}


def class_password() -> str:
    folder = Path(os.environ.get("AISCALE_HUB", Path.home() / "aiscale-hub"))
    file = folder / "password"
    require(
        file.exists(),
        f"{file} is not there, and a rehearsal logs in by the class's password: set AISCALE_HUB to "
        "the hub's folder; a hub for accounts (started by root) cannot be rehearsed",
    )
    return file.read_text().strip()


class Hub:
    def __init__(self, url: str, password: str) -> None:
        self.url, self.password = url.rstrip("/"), password

    def log_in(self, name: str) -> str:
        """A token of this person."""
        cookies = http.cookiejar.CookieJar()
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(cookies))
        browser.open(f"{self.url}/hub/login", timeout=LIMIT_S).close()
        form = {"username": name, "password": self.password, "_xsrf": _xsrf(cookies)}
        body = urllib.parse.urlencode(form).encode()
        home = urllib.parse.quote("/hub/home")  # not the page that starts a server
        browser.open(f"{self.url}/hub/login?next={home}", body, timeout=LIMIT_S).close()
        place = f"{self.url}/hub/api/users/{name}/tokens?_xsrf={_xsrf(cookies)}"
        asked = urllib.request.Request(place, b"{}", _JSON)
        with browser.open(asked, timeout=LIMIT_S) as answer:
            return json.load(answer)["token"]

    def start(self, name: str, token: str) -> str:
        """The address of this person's server, once it answers."""
        self._asks("POST", f"hub/api/users/{name}/server", token)
        address = f"{self.url}/user/{name}/"
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            servers = json.loads(self._asks("GET", f"hub/api/users/{name}", token))["servers"]
            if servers.get("", {}).get("ready"):
                return address
            time.sleep(RETRY_S)
        raise TimeoutError(
            f"{name}: the server is not up after {START_S} s: the hub's log says why"
        )

    def stop(self, name: str, token: str) -> None:
        self._asks("DELETE", f"hub/api/users/{name}/server", token)

    def _asks(self, method: str, path: str, token: str) -> bytes:
        headers = _JSON | {"Authorization": f"token {token}"}
        body = b"{}" if method == "POST" else None
        asked = urllib.request.Request(f"{self.url}/{path}", body, headers, method=method)
        with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
            return answer.read()


def _xsrf(cookies: http.cookiejar.CookieJar) -> str:
    """Of the pages below /hub, whose cookie has the longest path."""
    found = [cookie for cookie in cookies if cookie.name == "_xsrf"]
    return max(found, key=lambda cookie: len(cookie.path)).value
