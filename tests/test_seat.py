"""`check_seat`, in the first cell of lesson 00, and the rehearsal of a room of seats."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from aiscale.lesson import Notebook, check_seat, rehearsal, rehearsal_kernels, room, seat
from aiscale.plan import published
from aiscale.site import doctor
from aiscale.site.doctor import Finding

ROOT = Path(__file__).parents[1]
PEAKS = {row["lesson"][:2]: row["peak_bytes"] for row in published.measured("seat")["lessons"]}


@pytest.fixture
def posted(monkeypatch) -> list[tuple[str, str]]:
    """What the room is told: (what, name)."""
    told = []
    monkeypatch.setattr(room, "post", lambda what, name, *_, **__: told.append((what, name)))
    return told


def test_lesson_00_asks_in_its_first_code_cell():
    cells = Notebook(ROOT / "notebooks/00_start_here.ipynb").cells
    first = next(cell for cell in cells if cell.cell_type == "code")
    assert first.source.splitlines()[-1] == "check_seat()"


def test_a_seat_that_lacks_nothing_is_ready_and_its_ranks_have_met(posted, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "free_memory_bytes", lambda: max(PEAKS.values()) + 1)
    check_seat()
    assert "seat: this seat is ready: " in capsys.readouterr().out
    assert posted == [("seat", "ready")]


def test_what_a_seat_lacks_is_shown_with_its_remedy_and_the_room_learns_the_name_alone(
    posted, capsys, monkeypatch
):
    lacking = Finding("disk", "warning", "/home/ada/class", "free some space")
    not_asked = Finding("host name", "warning", "leads nowhere", "export it")
    monkeypatch.setattr(doctor, "examine", lambda: iter([lacking, not_asked]))
    monkeypatch.setattr(doctor, "free_memory_bytes", lambda: 2**30)
    monkeypatch.setattr(doctor, "as_rank", lambda *_: ["-c", "raise SystemExit(3)"])
    check_seat()
    said = capsys.readouterr().out
    assert "this seat is not ready\ndisk: /home/ada/class → free some space\n" in said
    assert "memory: 1.0 GiB of memory are free, and lessons want" in said
    assert "exit status 3" in said and "host name" not in said
    assert posted == [("seat", "not ready: disk, memory, ranks")]


def test_with_the_packages_of_colab_a_seat_is_ready_for_two_lessons(posted, capsys, monkeypatch):
    few = Finding("packages", "warning", "torch 2.13.0, ipyparallel 9.2.0", "pip install deepspeed")
    monkeypatch.setattr(doctor, "examine", lambda: iter([few]))
    monkeypatch.setattr(doctor, "free_memory_bytes", lambda: max(PEAKS.values()) + 1)
    monkeypatch.setattr(doctor, "as_rank", lambda *_: ["-c", ""])
    check_seat()
    said = capsys.readouterr().out
    assert "this seat is ready for lessons 00 and 03 alone\npackages: torch" in said
    assert posted == [("seat", "not ready: packages")]


def test_memory_is_held_against_what_the_lessons_were_measured_to_take():
    largest = PEAKS["07"]
    usual = max(peak for lesson, peak in PEAKS.items() if lesson != "07")
    states = [seat.memory(free).state for free in (usual - 1, usual, largest - 1, largest)]
    assert states == ["wrong", "warning", "warning", "ok"]
    assert "enough but for lesson 07" in seat.memory(usual).text


def test_the_limit_of_a_container_or_job_counts_as_memory(tmp_path, monkeypatch):
    """A group inside one with a limit; a quarter of what is taken is files, which give way."""
    group = tmp_path / "slice/job"
    group.mkdir(parents=True)
    limits = {group: "max", tmp_path / "slice": str(2**30)}
    for folder, limit in limits.items():
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{2**29}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {2**27}\n")
    (tmp_path / "membership").write_text("0::/slice/job\n")
    monkeypatch.setattr(doctor, "CGROUPS", str(tmp_path))
    left = list(doctor._left_in_groups(str(tmp_path / "membership")))
    assert left == [2**30 - 2**29 + 2**27]
    assert list(doctor._left_in_groups(str(tmp_path / "none"))) == []


def test_a_loopback_that_is_closed_is_wrong(monkeypatch):
    def refused(*_, **__):
        raise ConnectionRefusedError(111, "Connection refused")

    assert doctor._loopback().state == "ok"
    monkeypatch.setattr(doctor.socket, "create_connection", refused)
    finding = doctor._loopback()
    assert finding.state == "wrong" and "(Connection refused)" in finding.text


# A rehearsal -------------------------------------------------------------------------------------


def test_a_rehearsal_plays_the_lessons_of_the_half_day():
    page = (ROOT / "workshop/README.md").read_text()
    agenda = page.partition("\n### Half a day\n")[2].partition("\n### ")[0]
    assert [lesson[:2] for lesson in rehearsal.LESSONS] == re.findall(
        r"\[(\d\d) .*?blocks/", agenda
    )
    assert {"00.2", rehearsal_kernels.EXERCISE} == set(re.findall(r"\b\d\d\.\d\b", agenda))


def test_seats_that_only_post_are_counted_and_a_wrong_count_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(rehearsal, "THINK_S", 0.05)
    assert rehearsal.rehearse_seats(5) == 0
    said = capsys.readouterr().out
    assert "5 seats, requests only: 187 posts in" in said and "failures: none" in said

    post = rehearsal.Room.post

    def forgetful(room, seat, message):
        if message["what"] != "guess" or not seat.endswith("baa"):
            post(room, seat, message)

    monkeypatch.setattr(rehearsal.Room, "post", forgetful)
    assert rehearsal.rehearse_seats(5) == 1
    said = capsys.readouterr().out
    assert "guesses: the room shows 4, the seats sent 5" in said


@pytest.mark.extended
def test_kernels_of_a_rehearsal_come_to_the_room_and_what_fails_is_named(monkeypatch, capsys):
    ready = "from aiscale.lesson import check, check_seat\ncheck_seat()"
    sources = {"00_start_here": [ready, "1 / 0"], "exercise 03.1": [ready, 'check("03.1")']}
    parts = {name: ("notebooks/00_start_here.ipynb", cells) for name, cells in sources.items()}
    monkeypatch.setattr(rehearsal_kernels, "_parts", lambda: parts)
    assert rehearsal_kernels.rehearse_kernels(2) == 1
    said = capsys.readouterr().out
    assert "seat 2, 00_start_here: 1 / 0: ZeroDivisionError: division by zero" in said
    assert 'seat 1, exercise 03.1: check("03.1"): 03.1: no ranks are running' in said
    assert "failures: 4\n" in said, "both seats came, and are ready"
    held = float(re.search(r"all seats together held ([\d.]+) GiB", said)[1])
    assert 0.3 < held < 5


def test_a_rehearsals_kernels_run_the_core_path_filled():
    parts = rehearsal_kernels._parts()
    assert [*parts] == [*rehearsal.LESSONS, "exercise 03.1"]
    text = json.dumps(parts)
    assert "NotImplementedError" not in text
    assert "64 messages" not in text, "an optional cell of 00"
    assert parts["exercise 03.1"][1][-1] == 'check("03.1")'
