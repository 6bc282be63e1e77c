"""What a seat tells its class's room (workshop/room), if its environment has AISCALE_ROOM=URL.

    room.post("guess", "bytes of a step", guess=4000, ...)    # `predict` and `check` do
    hand("row 3, window")                                     # calls a helper; hand() takes it back

A seat is known by a pseudonym that it draws and keeps in its progress folder; no name is sent.
Without the variable nothing leaves the seat. A post is a process of its own (`room_post.py`): no
cell waits for it, and it arrives even if the notebook ends at once.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from urllib.parse import urlsplit

from aiscale.lesson import progress, room_post

_VARIABLE = "AISCALE_ROOM"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_posting: list[subprocess.Popen] = []
_told: set[str] = set()  #: what this process has said once


def post(what: str, name: str, lesson: str = "", **facts: object) -> bool:
    """Tell the room, if there is one; whether it is told. Never raises, never waits for it."""
    url = os.environ.get(_VARIABLE, "")
    if not url:
        return False
    message = {"what": what, "name": name, "lesson": lesson or progress.this_lesson(), **facts}
    try:
        place = urlsplit(url)
        if place.scheme != "https" and not (place.scheme == "http" and place.hostname in _LOOPBACK):
            raise ValueError(
                f"{_VARIABLE} is {url.partition('#')[0]}, but it must begin with https://, or with "
                "http://127.0.0.1 for a room on this machine: ask your instructor for the address"
            )
        seat, body = pseudonym(), json.dumps(message, default=str)
        _say_once(
            f"your guesses and tries go to {place.hostname} as {seat}, without your name. The room "
            f"sees counts, helpers see where {seat} is; `hand('row 3')` calls one, after "
            "`from aiscale.lesson import hand`"
        )
        _say_what_failed(place.hostname)
        _send({"url": url, "seat": seat, "body": body})
    except (OSError, ValueError) as error:
        _say_once(f"nothing is sent. {error}")
        return False
    return True


def hand(where: str = "") -> None:
    """Raise a hand: helpers see where you sit. Without a place it goes down."""
    if not post("hand", where):
        progress.show("room: this seat is in none. Put up your own hand")
    else:
        progress.show(f"room: your hand is {'up' if where else 'down'}")


def told() -> str:
    """What the card says of it."""
    if os.environ.get(_VARIABLE):
        return f"the class's room has your guesses and tries, as {pseudonym()}"
    return "nothing leaves this machine"


def pseudonym() -> str:
    """This seat's, such as tofi-rane: drawn once, and kept in its progress folder."""
    syllables = [secrets.choice(_CONSONANTS) + secrets.choice(_VOWELS) for _ in range(4)]
    first, second = "".join(syllables[:2]), "".join(syllables[2:])
    return progress.keep_once("pseudonym", f"{first}-{second}")


def _say_once(text: str) -> None:
    if text not in _told:
        _told.add(text)
        progress.show(f"room: {text}")


def _say_what_failed(host: str) -> None:
    """Of the posts that have ended by now."""
    statuses = {each.poll() for each in _posting}
    _posting[:] = [each for each in _posting if each.poll() is None]
    if room_post.REFUSED in statuses:
        _say_once(f"{host} refuses what this seat sends: ask your instructor for the address")
    elif statuses - {None, 0}:
        _say_once(f"{host} does not answer: your guesses stay on this seat. Go on")


def _send(message: dict) -> None:
    posting = subprocess.Popen(
        [sys.executable, "-I", "-S", room_post.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C, and a kernel's interrupt, are not for it
    )
    _posting.append(posting)
    with posting.stdin as pipe:
        pipe.write(json.dumps(message).encode())  # fits into the pipe: this does not wait
