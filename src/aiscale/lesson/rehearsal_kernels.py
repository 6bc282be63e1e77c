"""`aiscale room rehearse --kernels K`: K JupyterLab servers run the half-day's notebooks at once.

Each seat has a folder, a server and a kernel of its own: on this machine, or with `--hub URL` those
that a class's hub starts for rehearsal-1, rehearsal-2 and so on. All begin a
lesson together; its cells run one after the other, without a participant's pauses and with the
kit's lines in all gaps, so that every check passes through the referee. Between lessons the kernels
shut down, as in a break. Every two seconds the proportional set sizes (PSS) of each seat's
processes are added.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tornado.httpclient import AsyncHTTPClient, HTTPError, HTTPRequest
from tornado.websocket import websocket_connect

from aiscale.errors import require
from aiscale.lesson import rehearsal
from aiscale.lesson.notebook import OPTIONAL, Notebook, tags
from aiscale.lesson.rehearsal_hub import Hub, class_password
from aiscale.lesson.workbooks import sections, solved, workshop
from aiscale.processes import kill_marked, marked, pss_bytes, usable_cores

GIB = 2**30
MARK = "AISCALE_SEAT"  #: all processes of a seat inherit this variable
EXERCISE = "03.1"  # 00.2, the other one of the half-day, stands in lesson 00
SAMPLE_S = 2.0
START_S = 120  # for a server to come up, on a busy machine
CELL_S = 900  # the slowest of four seats took 116 s on two busy cores
RETRY_S = 0.5
MOST_MESSAGE_BYTES = 2**28  # pictures among them


@dataclass
class Seat:
    """A participant: a server, and what its cells took."""

    name: str
    mark: tuple[str, str]  #: a variable that all its processes inherit, and its value
    token: str = ""
    address: str = ""
    peak_bytes: dict[str, int] = field(default_factory=dict)  #: by lesson
    seconds: dict[str, float] = field(default_factory=dict)  #: by lesson
    slowest: tuple[float, str] = (0.0, "")  #: seconds and first line of a cell
    failures: list[str] = field(default_factory=list)

    def held_bytes(self) -> int:
        return sum(pss_bytes(pid) for pid in marked(*self.mark))


def rehearse_kernels(count: int, hub: str = "") -> int:
    """Play the half-day with `count` kernels; print what it took; the exit status.

    hub: the address of a hub on this machine.
    """
    require(count >= 1, f"--kernels {count}, but a rehearsal needs one at least")
    require(
        Path("/proc/self/smaps_rollup").exists(),
        "this machine has no /proc/PID/smaps_rollup: memory by PSS is known on Linux alone",
    )
    if hub:
        with _on_hub(count, Hub(hub, class_password())) as seats:
            return rehearsal.said_failures(_played(seats))
    with rehearsal.opened() as room:
        print(f"wall:    {room.wall_url}\nhelpers: {room.helpers_url}", flush=True)
        with _on_this_machine(count, room.seats_url) as seats:
            failures = _played(seats)
        there = room.wall()
    if (there["seats"], there["ready"]) != (count, count):
        text = f"{there['seats']} seats came to the room, {there['ready']} said that they are ready"
        failures.append(f"of {count} kernels {text}")
    return rehearsal.said_failures(failures)


def _played(seats: list[Seat]) -> list[str]:
    """Play the half-day and print what it took; what failed."""
    load, began = os.getloadavg()[0], time.monotonic()
    most_bytes = asyncio.run(_half_day(seats))
    minutes = (time.monotonic() - began) / 60
    cores = len(usable_cores())
    print(f"{len(seats)} kernels, {minutes:.0f} minutes, {cores} cores, load {load:.1f} before")
    _show(seats, most_bytes)
    return [failure for seat in seats for failure in seat.failures]


def _show(seats: list[Seat], most_bytes: int) -> None:
    print(f"{'lesson':32} {'GiB of a seat':>14} {'seconds':>16}")
    for lesson in seats[0].seconds:
        peak_bytes = max(seat.peak_bytes.get(lesson, 0) for seat in seats)
        seconds = [seat.seconds[lesson] for seat in seats if lesson in seat.seconds]
        took = f"{min(seconds):.0f} to {max(seconds):.0f}"
        print(f"{lesson:32} {peak_bytes / GIB:14.2f} {took:>16}")
    print(f"all seats together held {most_bytes / GIB:.2f} GiB at most (PSS)")
    seconds, cell = max(seat.slowest for seat in seats)
    print(f"the slowest cell took {seconds:.0f} s: {cell}")


# Servers -----------------------------------------------------------------------------------------


@contextmanager
def _on_hub(count: int, hub: Hub) -> Iterator[list[Seat]]:
    """Seats of a hub, which start at the same time, as a class does."""
    names = [f"rehearsal-{number}" for number in range(1, count + 1)]
    seats = [Seat(name, ("JUPYTERHUB_USER", name)) for name in names]
    with ThreadPoolExecutor(count) as pool:
        try:
            for seat, token in zip(seats, pool.map(hub.log_in, names), strict=True):
                seat.token = token
            tokens = [seat.token for seat in seats]
            for seat, address in zip(seats, pool.map(hub.start, names, tokens), strict=True):
                seat.address = address
            yield seats
        finally:
            for seat in seats:
                with suppress(OSError):  # it has not started
                    hub.stop(seat.name, seat.token)


@contextmanager
def _on_this_machine(count: int, room_url: str) -> Iterator[list[Seat]]:
    """Seats with a server each, over a copy of what a participant has."""
    seats = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number in range(1, count + 1):
                seat = Seat(f"seat {number}", (MARK, uuid.uuid4().hex), uuid.uuid4().hex)
                seats.append(seat)
                home = Path(folder, seat.name)
                _copy_class(home)
                _start(seat, home, room_url)
            for seat in seats:
                seat.address = _address(seat.name, Path(folder, seat.name))
            yield seats
        finally:
            for seat in seats:
                kill_marked(*seat.mark)


def _copy_class(folder: Path) -> None:
    kit = workshop().parent
    shutil.copytree(kit / "notebooks", folder / "notebooks")
    shutil.copytree(kit / "workshop/exercises", folder / "workshop/exercises")


def _start(seat: Seat, folder: Path, room_url: str) -> None:
    programs = Path(sys.executable).parent
    home = folder / "home"
    home.mkdir()
    variable, value = seat.mark
    env = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
    env |= {f"JUPYTER_{kind}_DIR": str(home / kind) for kind in ("CONFIG", "DATA", "RUNTIME")}
    env |= {variable: value, "JUPYTER_TOKEN": seat.token, "AISCALE_ROOM": room_url}
    env |= {"OMP_WAIT_POLICY": "PASSIVE"}  # as the hub sets it
    env |= {"PATH": os.pathsep.join([str(programs), os.environ.get("PATH", os.defpath)])}
    command = [programs / "jupyter-lab", "--no-browser", "--allow-root"]
    command += ["--ServerApp.ip=127.0.0.1", "--ServerApp.port=0"]
    command += [f"--ServerApp.root_dir={folder}"]
    with (home / "log").open("wb") as log:
        subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)


def _address(name: str, folder: Path) -> str:
    """Of the server's pages, once it is up."""
    home = folder / "home"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for file in (home / "RUNTIME").glob("jpserver-*.json"):
            with suppress(ValueError):  # it is being written
                return json.loads(file.read_text())["url"]
        time.sleep(RETRY_S)
    end = (home / "log").read_text()[-1000:]
    raise TimeoutError(f"{name}: JupyterLab's server is not up after {START_S} s\n{end}")


# The half-day ------------------------------------------------------------------------------------


def _parts() -> dict[str, tuple[str, list[str]]]:
    """The half-day: (path of the notebook, sources of its code cells) by lesson and exercise."""
    parts = {}
    for lesson in rehearsal.LESSONS:
        notebook = Notebook(workshop().parent / "notebooks" / f"{lesson}.ipynb")
        cells = [cell for cell in solved(notebook).cells if OPTIONAL not in tags(cell)]
        sources = [cell.source for cell in cells if cell.cell_type == "code"]
        parts[lesson] = f"notebooks/{lesson}.ipynb", sources
    lesson = next(name for name in rehearsal.LESSONS if name[:2] == EXERCISE[:2])
    notebook = Notebook(workshop() / "exercises" / f"{lesson}.ipynb")
    mine = sections(solved(notebook).cells)
    cells = [*mine[""], *mine[EXERCISE]]
    sources = [*(cell.source for cell in cells), f'check("{EXERCISE}")']
    parts[f"exercise {EXERCISE}"] = f"workshop/exercises/{lesson}.ipynb", sources
    return parts


@dataclass
class Watched:
    most_bytes: int = 0  #: that all seats held at once


async def _half_day(seats: list[Seat]) -> int:
    """The most bytes that all seats held at once."""
    watched = Watched()
    for lesson, (path, sources) in _parts().items():
        print(f"{lesson} ...", file=sys.stderr, flush=True)
        watch = asyncio.create_task(_watch(seats, lesson, watched))
        await asyncio.gather(*(_take_part(seat, lesson, path, sources) for seat in seats))
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
    return watched.most_bytes


async def _watch(seats: list[Seat], lesson: str, watched: Watched) -> None:
    while True:
        held = [await asyncio.to_thread(seat.held_bytes) for seat in seats]
        for seat, held_bytes in zip(seats, held, strict=True):
            seat.peak_bytes[lesson] = max(held_bytes, seat.peak_bytes.get(lesson, 0))
        watched.most_bytes = max(watched.most_bytes, sum(held))
        await asyncio.sleep(SAMPLE_S)


async def _take_part(seat: Seat, lesson: str, path: str, sources: list[str]) -> None:
    """Run a lesson's cells on a kernel of this seat; the first that fails ends the lesson."""
    began = time.monotonic()
    try:
        async with Kernel(seat.address, seat.token, path) as kernel:
            for source in sources:
                cell_began = time.monotonic()
                error = await asyncio.wait_for(kernel.run(source), CELL_S)
                cell = f"{lesson}: {source.strip().splitlines()[0]}"
                seat.slowest = max(seat.slowest, (time.monotonic() - cell_began, cell))
                if error:
                    seat.failures.append(f"{seat.name}, {cell}: {error}")
                    break
    except (OSError, HTTPError, TimeoutError) as error:
        seat.failures.append(f"{seat.name}, {lesson}: {error!r}")
    seat.seconds[lesson] = time.monotonic() - began


class Kernel:
    """A notebook's kernel on a Jupyter server, by the protocol that JupyterLab speaks."""

    def __init__(self, address: str, token: str, path: str) -> None:
        self.address, self.path = address, path
        self.options = {"headers": {"Authorization": f"token {token}"}, "connect_timeout": START_S}

    async def __aenter__(self) -> Kernel:
        about = {"path": self.path, "name": Path(self.path).name, "type": "notebook"}
        about["kernel"] = {"name": "python3"}
        made = json.loads(await self._asks("POST", "api/sessions", json.dumps(about)))
        self.session, kernel = made["id"], made["kernel"]["id"]
        channels = self.address.replace("http", "ws", 1) + f"api/kernels/{kernel}/channels"
        self.line = await websocket_connect(
            HTTPRequest(channels, **self.options), max_message_size=MOST_MESSAGE_BYTES
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self.line.close()
        await self._asks("DELETE", f"api/sessions/{self.session}")

    async def _asks(self, method: str, path: str, body: str | None = None) -> bytes:
        options = self.options | {"request_timeout": START_S}
        request = HTTPRequest(self.address + path, method, body=body, **options)
        return (await AsyncHTTPClient().fetch(request)).body

    async def run(self, source: str) -> str:
        """Run a cell to its end; what went wrong in a line, empty if nothing did."""
        id = uuid.uuid4().hex
        header = {"msg_id": id, "msg_type": "execute_request", "version": "5.3"}
        header |= {"session": self.session, "username": "rehearsal"}
        content = {"code": source, "silent": False, "store_history": True, "allow_stdin": False}
        message = {"channel": "shell", "header": header, "parent_header": {}, "metadata": {}}
        await self.line.write_message(json.dumps(message | {"content": content}))
        error, replied, idle = "", False, False
        # The reply and the end of the output come on two channels, in any order.
        while not (replied and idle):
            told = await self.line.read_message()
            if told is None:
                return "the kernel's connection closed: it may have died"
            answer = json.loads(told)
            if answer["parent_header"].get("msg_id") != id:
                continue
            content = answer["content"]
            if answer["msg_type"] == "execute_reply":
                replied = True
                if content["status"] != "ok":
                    error = f"{content.get('ename')}: {content.get('evalue')}".splitlines()[0]
            elif answer["msg_type"] == "display_data":
                error = error or _not_right(content)
            idle |= answer["msg_type"] == "status" and content["execution_state"] == "idle"
        return error


def _not_right(content: dict) -> str:
    """What a `check` found, if it was not right: it raises nothing."""
    facts = content["metadata"].get("aiscale", {})
    if "check" in facts and facts["state"] != "right":
        return content["data"]["text/plain"].splitlines()[0]
    return ""
