"""What a class's room knows: the guesses of each seat and where it stands, in one file that the instructor deletes.

A seat is a pseudonym: the room learns no name. What a seat posts may be anything, from a stranger too.
"""

import hashlib
import json
import math
import re
import secrets
import time
from pathlib import Path

from room.shown import AGAIN, HIDDEN, shown
from tornado.web import HTTPError

from aiscale.errors import write_whole

SEAT = re.compile(r"[a-z]{4}-[a-z]{4}")
MOST_SEATS, MOST_BYTES = 200, 2**19  # a day's lessons of a seat take a tenth
POSTS_A_SECOND, POSTS_AT_ONCE = 5, 60  # of a seat: Run All posts a whole lesson at once


class Room:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.changed = not file.exists()
        if self.changed:
            tokens = {name: secrets.token_urlsafe(12) for name in ("seats_token", "helpers_token")}
            self.kept = tokens | {"seats": {}, "questions": {}}
        else:
            self.kept = json.loads(file.read_text())

    def save(self) -> None:
        if self.changed:
            write_whole(self.file, json.dumps(self.kept, indent=1) + "\n", mode=0o600)
            self.changed = False

    def post(self, seat: str, body: bytes) -> None:
        """Take what a seat sends; raises HTTPError."""
        seats, now = self.kept["seats"], time.time()
        if not SEAT.fullmatch(seat) or (seat not in seats and len(seats) == MOST_SEATS):
            raise HTTPError(400)
        stands = {"at": "", "moved": now, "tries": 0, "hand": None, "place": "", "ready": False}
        sends = {"posts": POSTS_AT_ONCE, "last": now, "bytes": 0}
        about = seats.setdefault(seat, stands | sends)
        posts = min(POSTS_AT_ONCE, about["posts"] + (now - about["last"]) * POSTS_A_SECOND)
        about |= {"posts": max(posts - 1, 0), "last": now, "bytes": about["bytes"] + len(body)}
        if posts < 1 or about["bytes"] > MOST_BYTES:
            raise HTTPError(429)
        self.changed = True
        try:
            self._take(seat, about, json.loads(body), now)
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            raise HTTPError(400) from None

    def _take(self, seat: str, about: dict, sent: dict, now: float) -> None:
        what, name = sent["what"], sent["name"][:160]
        if what == "hand":
            about |= {"hand": now if name else None, "place": name[:40]}
            return
        ready = name == "ready" if what == "seat" else about["ready"]
        at = f"{sent['lesson'][:40]} · {name}"
        right = what == "check" and sent["state"] == "right"
        tries = min(int(sent["tries"]), 999) if what == "check" and not right else 0
        moved = self._vote(seat, sent) if what == "guess" else right
        if moved or at != about["at"]:
            about["moved"] = now
        about |= {"at": at, "tries": tries, "hand": None if right else about["hand"], "ready": ready}

    def _vote(self, seat: str, sent: dict) -> bool:
        """Whether a seat's vote is another one now. Who has measured votes no more."""
        about = {name: sent[name] for name in ("lesson", "name", "form", "unit", "choices", "rows", "columns")}
        # TypeError if one is no list
        texts = [*about.values()][:4] + about["choices"] + about["rows"] + about["columns"]
        if about["form"] not in ("number", "choice", "grid") or not all(isinstance(each, str) for each in texts):
            raise ValueError("not a question")
        guess, truth = (checked(about, sent[name]) for name in ("guess", "truth"))
        id = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]
        asked = {**about, "stage": HIDDEN, "votes": {}}
        question = self.kept["questions"].setdefault(id, asked)
        vote = question["votes"].setdefault(seat, {"first": None, "second": None, "truth": None})
        before = dict(vote)
        if vote["truth"] is None:
            vote["truth"] = truth
            again = question["stage"] >= AGAIN and vote["first"] is not None
            if guess is not None:
                vote["second" if again else "first"] = guess
        return vote != before

    def wall(self, id: str) -> dict:
        """What the wall shows: of the question with this id, or of the newest, what its stage allows."""
        seats, questions = self.kept["seats"].values(), self.kept["questions"]
        # Those that a fifth of the room has come to, the newest last: a seat alone puts nothing on the wall.
        asked = [id for id, question in questions.items() if 5 * len(question["votes"]) >= len(seats)]
        id = id if id in asked else (asked or [""])[-1]
        counts = {"seats": len(seats), "ready": sum(about["ready"] for about in seats)}
        return counts | {"ids": asked, "id": id} | (shown(questions[id]) if id else {})

    def helpers(self) -> list[dict]:
        """A row for each seat: raised hands first, then who has not moved for longest."""
        now, rows = time.time(), []
        for seat, about in self.kept["seats"].items():
            hand = about["hand"] and round((now - about["hand"]) / 60)
            rows.append(about | {"seat": seat, "hand": hand, "minutes": round((now - about["moved"]) / 60)})
        return sorted(rows, key=lambda row: (row["hand"] is None, -row["minutes"]))

    def turn(self, id: str, stage: int) -> None:
        self.kept["questions"][id]["stage"] = range(5)[stage]
        self.changed = True


def checked(about: dict, value: object) -> object:
    """A guess or truth; ValueError, TypeError or OverflowError if it is not one of its question's form."""
    if value is None:
        return None
    if about["form"] == "number":
        fits = math.isfinite(value)
    elif about["form"] == "choice":
        fits = value in range(len(about["choices"]))
    else:
        fits = len(value) == len(about["rows"]) * len(about["columns"]) and all(isinstance(cell, str) for cell in value)
    if not fits:
        raise ValueError(value)
    return value
