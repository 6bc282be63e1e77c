"""`aiscale room rehearse`: a half-day with synthetic participants, before the real ones come.

    aiscale room rehearse --seats 30      # what thirty seats post; no kernels
    aiscale room rehearse --kernels 4     # four JupyterLab servers run the half-day's notebooks

Seats are requests alone: guesses, a second vote, failing tries, a hand, against a room of their
own. They show whether the room counts right and how fast it answers. What a seat needs is shown by
kernels (`rehearsal_kernels.py`).
"""

from __future__ import annotations

import http.client
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from aiscale.errors import require
from aiscale.processes import pss_bytes

MOST_SEATS = 200  # as many as a room takes (workshop/room/state.py)
LESSONS = ("00_start_here", "03_ddp", "04_zero")
THINK_S = 2.0  # a participant answers within this time; real ones take minutes
TRIES = 3  # of the gap of each lesson, the last one right
HIDDEN, AGAIN, TRUTH = 0, 2, 4  # stages of a question
MIB = 2**20

_QUESTION = {"what": "guess", "unit": "", "choices": [], "rows": [], "columns": [], "truth": None}
#: A question of each form: what is asked, guesses that people make, and the truth.
QUESTIONS = (
    (
        {"name": "bytes that a rank sends", "form": "number", "unit": "bytes"},
        (MIB, 2 * MIB, 3 * MIB, 4 * MIB),
        3 * MIB,
    ),
    (
        {"name": "who reports it", "form": "choice", "choices": ["none", "who came", "all"]},
        (0, 1, 2),
        1,
    ),
    (
        {"name": "after it", "form": "grid", "rows": ["0", "1"], "columns": ["a", "b"]},
        (["1", "2", "1", "2"], ["1", "", "", "2"], ["2", "1", "2", "1"]),
        ["1", "", "", "2"],
    ),
)


@dataclass
class Room:
    """A room's server, and how it answered."""

    seats_url: str
    wall_url: str
    helpers_url: str
    pid: int
    seconds: list[float] = field(default_factory=list)  #: of each post
    failures: list[str] = field(default_factory=list)

    def asks(self, method: str, path: str, body: object = None, url: str = "", seat: str = ""):
        """(status, answer) of a request with the token of this address."""
        place = urlsplit(url or self.wall_url)
        connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
        headers = {"Authorization": f"Bearer {place.fragment}", "Seat": seat}
        text = None if body is None else json.dumps(body)
        connection.request(method, f"/api/{path}", text, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()

    def post(self, seat: str, message: dict) -> None:
        began = time.monotonic()
        try:
            status, _ = self.asks("POST", "seat", message, self.seats_url, seat)
        except OSError as error:
            status = repr(error)
        self.seconds.append(time.monotonic() - began)
        if status != 200:
            self.failures.append(f"{seat}, {message['what']} {message['name']}: {status}")

    def wall(self) -> dict:
        return json.loads(self.asks("GET", "wall")[1])

    def turn(self, stage: int) -> dict:
        """The wall after the instructor turned its question to this stage."""
        self.asks("POST", "wall", {"id": self.wall()["id"], "stage": stage})
        return self.wall()

    def expect(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            self.failures.append(f"{what}: the room shows {found}, the seats sent {expected}")


@contextmanager
def opened() -> Iterator[Room]:
    """A room on a free port, whose file goes with it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "aiscale", "room", "--port", "0"]
        command += ["--file", str(Path(folder, "room.json"))]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            said = [server.stdout.readline() for _ in range(4)]
            require(all(said), "the room did not start: `aiscale room` says why")
            seats, wall, helpers = (re.search(r"http\S+", line)[0] for line in said[:3])
            yield Room(seats, wall, helpers, server.pid)
        finally:
            server.terminate()
            server.wait()
            server.stdout.close()


def rehearse_seats(count: int) -> int:
    """Play the half-day of `count` seats against a room; print what it took; the exit status."""
    require(1 <= count <= MOST_SEATS, f"--seats {count}, but a room takes 1 to {MOST_SEATS}")
    with opened() as room:
        print(f"wall:    {room.wall_url}\nhelpers: {room.helpers_url}", flush=True)
        seats = [_pseudonym(number) for number in range(count)]
        began = time.monotonic()
        _play(room, seats)
        seconds = time.monotonic() - began
        kept_bytes = pss_bytes(room.pid)
    print(f"{count} seats, requests only: {len(room.seconds)} posts in {seconds:.0f} s")
    slowest, usual = max(room.seconds), median(room.seconds)
    print(f"an answer took {usual * 1e3:.0f} ms (median), {slowest * 1e3:.0f} ms at most")
    print(f"the room's server holds {kept_bytes / MIB:.0f} MiB (PSS)")
    return said_failures(room.failures)


def said_failures(failures: list[str]) -> int:
    print(f"failures: {len(failures) or 'none'}")
    for failure in failures:
        print(f"  {failure}")
    return int(bool(failures))


def _pseudonym(number: int) -> str:
    first, second = divmod(number, 26)
    return f"seat-{chr(97 + first)}{chr(97 + second)}aa"


def _play(room: Room, seats: list[str]) -> None:
    with ThreadPoolExecutor(len(seats)) as pool:

        def all_do(part: Callable[[str], None]) -> None:
            for done in [pool.submit(_after_thinking, part, seat) for seat in seats]:
                done.result()

        ready = {"what": "seat", "lesson": LESSONS[0], "name": "ready"}
        all_do(lambda seat: room.post(seat, ready))
        room.expect("seats that are ready", room.wall()["ready"], len(seats))
        for lesson in LESSONS:
            for asked, guesses, truth in QUESTIONS:
                _ask(room, seats, all_do, _QUESTION | asked | {"lesson": lesson}, guesses, truth)
            all_do(lambda seat, lesson=lesson: _try_gap(room, seat, lesson))
        _raise_a_hand(room, seats[0])


def _after_thinking(part: Callable[[str], None], seat: str) -> None:
    time.sleep(random.uniform(0, THINK_S))
    part(seat)


def _ask(room: Room, seats: list[str], all_do, question: dict, guesses: tuple, truth) -> None:
    """All guess, talk, vote again and measure, and the wall is held to what they sent."""
    name = f"{question['lesson']}, {question['name']}"
    first = {seat: random.choice(guesses) for seat in seats}
    all_do(lambda seat: room.post(seat, question | {"guess": first[seat]}))
    page = room.wall()
    room.expect(f"{name}: guesses", page.get("guessed"), len(seats))
    room.expect(f"{name}: votes before they are shown", "first" in page, False)
    room.turn(AGAIN)
    # Every second seat is convinced of the truth.
    convinced = seats[::2]
    second = first | dict.fromkeys(convinced, truth)
    all_do(lambda seat: room.post(seat, question | {"guess": second[seat]}))
    measured = question | {"guess": None, "truth": truth}
    all_do(lambda seat: room.post(seat, measured))
    page = room.turn(TRUTH)
    right = [sum(votes[seat] == truth for seat in seats) for votes in (first, second)]
    room.expect(f"{name}: right at first and in the end", page.get("held"), right)


def _try_gap(room: Room, seat: str, lesson: str) -> None:
    check = {"what": "check", "lesson": lesson, "name": f"{lesson[:2]}.a"}
    for number in range(1, TRIES + 1):
        state = "right" if number == TRIES else "wrong"
        room.post(seat, check | {"state": state, "tries": number})


def _raise_a_hand(room: Room, seat: str) -> None:
    hand = {"what": "hand", "lesson": LESSONS[-1]}
    room.post(seat, hand | {"name": "row 3"})
    rows = json.loads(room.asks("GET", "helpers")[1])["rows"]
    room.expect("who calls a helper", (rows[0]["seat"], rows[0]["place"]), (seat, "row 3"))
    room.post(seat, hand | {"name": ""})
