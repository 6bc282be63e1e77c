"""The server of a class's room: `aiscale room`, on the loopback, alone or behind a hub (workshop/jupyterhub_config.py).

Seats post with one token; wall and helpers read with another, behind the # of their addresses: browsers send that to
nobody. Nothing is logged. Tornado comes with every JupyterLab, so there is nothing more to install.
"""

import asyncio
import hmac
import json
import logging
import signal
from pathlib import Path
from urllib.parse import urlsplit

from room.state import Room
from tornado import httpserver, ioloop, netutil, web

from aiscale.errors import require

HERE = Path(__file__).parent
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"
LIMITS = {"max_body_size": 8192, "max_header_size": 8192, "body_timeout": 5, "idle_connection_timeout": 20}


class Page(web.RequestHandler):
    def get(self, name: str) -> None:
        self.set_header("Content-Security-Policy", f"{POLICY}; frame-ancestors 'none'; base-uri 'none'")
        self.render("page.html", name=name)


class Api(web.RequestHandler):
    token = "helpers_token"

    def prepare(self) -> None:
        self.room: Room = self.settings["room"]
        given = self.request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {self.room.kept[self.token]}".encode()):
            raise web.HTTPError(403)


class Seat(Api):
    token = "seats_token"

    def post(self) -> None:
        self.room.post(self.request.headers.get("Seat", ""), self.request.body)


class Wall(Api):
    def get(self) -> None:
        self.finish(self.room.wall(self.get_query_argument("id", "")))

    def post(self) -> None:
        self.room.turn(**json.loads(self.request.body))


class Helpers(Api):
    def get(self) -> None:
        self.finish({"rows": self.room.helpers()})


async def serve(file: Path, port: int, url: str) -> None:
    """Serve until this process is ended. `url`: the room's address for seats, if it is not this machine's."""
    room = Room(file)
    try:
        sockets = netutil.bind_sockets(port, "127.0.0.1")
    except OSError as error:
        require(False, f"port {port} of 127.0.0.1 cannot be had ({error.strerror}): name another by --port")
    url = (url or f"http://127.0.0.1:{sockets[0].getsockname()[1]}").rstrip("/")
    base = urlsplit(url).path
    pages = [(rf"{base}/(wall|helpers)", Page), (rf"{base}/(\w+\.(?:js|css))", web.StaticFileHandler, {"path": HERE})]
    api = [(f"{base}/api/seat", Seat), (f"{base}/api/wall", Wall), (f"{base}/api/helpers", Helpers)]
    app = web.Application(pages + api, room=room)
    logging.getLogger("tornado.access").disabled = True  # it would keep who was here
    httpserver.HTTPServer(app, **LIMITS).add_sockets(sockets)
    ioloop.PeriodicCallback(room.save, 2000).start()
    print(f"seats:   AISCALE_ROOM={url}/#{room.kept['seats_token']}")
    for page in ("wall", "helpers"):
        print(f"{page}: {url}/{page}#{room.kept['helpers_token']}")
    print(f"kept in {file}: delete it after the class. Ctrl-C ends the room.", flush=True)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    room.save()
