"""Serves build/site to a class, as a service of its hub (jupyterhub_config.py): lessons to read, quiz, planner.

The hub's proxy hands on whole paths, so that it cannot be Python's own http.server.
"""

import asyncio
import os
from pathlib import Path
from urllib.parse import urlsplit

from tornado import web

SITE = Path(__file__).absolute().parents[1] / "build" / "site"


async def main() -> None:
    prefix, port = os.environ["JUPYTERHUB_SERVICE_PREFIX"], urlsplit(os.environ["JUPYTERHUB_SERVICE_URL"]).port
    files = {"path": str(SITE), "default_filename": "index.html"}
    web.Application([(f"{prefix}(.*)", web.StaticFileHandler, files)]).listen(port, "127.0.0.1")
    await asyncio.Event().wait()


asyncio.run(main())
