"""A class is packed into one archive, and a seat made as new without losing what somebody wrote on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from aiscale.book import BookError, classroom
from aiscale.cluster import guard
from ranks import wait_until

ROOT = Path(__file__).parents[1]
LESSON = "notebooks/00_start_here.ipynb"


def pack(folder: Path, *words: str) -> subprocess.CompletedProcess:
    command = ["make", "class", f"BUILD={folder / 'build'}", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The archive of a class with a gallery, a deck and a wheel."""
    folder = tmp_path_factory.mktemp("class")
    for page in ("gallery/index.html", "gallery/figures/a.png", "slides/hour_1.html"):
        (folder / "build" / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / "build" / page).write_text("a page")
    stand_in = folder / "python"  # for pip: notes what it is asked, and makes one wheel
    wheels = f"{folder}/build/class/aiscale/wheels"
    stand_in.write_text(f"""#!/bin/sh
echo "$@" >> {folder}/asked
mkdir -p {wheels} && touch {wheels}/a.whl
cp {folder}/build/class/lessons.txt {folder}
""")
    stand_in.chmod(0o755)
    done = pack(folder, "WHEELS=yes", f"BIN={folder}")
    assert done.returncode == 0, done.stderr
    return folder / "build/class.tar.gz"


@pytest.fixture
def seat(packed, tmp_path):
    """A seat at which somebody has worked."""
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="data")
    place = tmp_path / "aiscale"
    (place / LESSON).write_text("my own notes")
    (place / "notebooks/progress").mkdir()
    (place / "notebooks/progress/00_start_here.json").write_text("{}")
    (place / "progress").mkdir()
    (place / "notebooks/mine.ipynb").write_text("another notebook of mine")
    return place


def test_the_archive_holds_what_a_seat_without_network_needs_and_no_solutions(packed):
    with tarfile.open(packed) as tar:
        names = set(tar.getnames())
    for name in (
        "Makefile",
        "requirements.lock",
        "scripts/setup.sh",
        "src/aiscale/cli.py",
        LESSON,
        "workshop/README.md",
    ):
        assert f"aiscale/{name}" in names
    for name in ("build/gallery/index.html", "build/gallery/figures/a.png", "build/slides/hour_1.html"):
        assert f"aiscale/{name}" in names
    assert not [name for name in names if name.startswith(("aiscale/tests", "aiscale/workshop/solutions"))]
    assert list(packed.parent.glob("class/*")) == [], "nothing else is left"


def test_wheels_are_those_of_the_lessons(packed):
    folder = packed.parents[1]
    rest, torch = (folder / "asked").read_text().splitlines()
    assert rest.startswith("-m pip wheel -q --no-deps") and "--extra-index-url" not in rest
    assert "torch==" in torch and torch.endswith("/whl/cpu")
    lessons = (folder / "lessons.txt").read_text()
    assert "jupyterlab==" in lessons and "torch==" not in lessons and "pytest==" not in lessons
    with tarfile.open(packed) as tar:
        assert "aiscale/wheels/a.whl" in tar.getnames()


def test_a_class_without_a_gallery_is_refused_and_leaves_nothing(tmp_path):
    done = pack(tmp_path)
    assert done.returncode and "there is no gallery: `make workshop`, or `aiscale notebooks" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_seat_is_as_new_and_what_was_written_there_is_kept(seat, packed):
    said = classroom.reset(seat, packed, yes=True)
    assert "1 changed files, 0 missing ones, progress in 2 folders" in said
    assert json.loads((seat / LESSON).read_text())["cells"]
    assert not (seat / "notebooks/progress").exists() and not (seat / "progress").exists()
    assert (seat / "notebooks/mine.ipynb").exists(), "what is no lesson stays where it is"
    (kept,) = (seat / "kept").iterdir()
    assert (kept / LESSON).read_text() == "my own notes" and (kept / "notebooks/progress/00_start_here.json").exists()
    assert "0 changed files" in classroom.reset(seat, packed, yes=True), "there is nothing more to do"


def test_without_an_answer_nothing_changes(seat, packed, monkeypatch):
    with pytest.raises(BookError, match="give --yes"):
        classroom.reset(seat, packed)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert classroom.reset(seat, packed) == "nothing was changed"
    assert (seat / LESSON).read_text() == "my own notes" and not (seat / "kept").exists()


def test_in_a_clone_the_last_commit_has_the_originals(seat):
    git = ["git", "-C", str(seat), "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "notebooks"], ["commit", "-qm", "as given"]):
        subprocess.run([*git, *words], check=True)
    (seat / LESSON).write_text("changed")
    classroom.reset(seat, yes=True)
    assert (seat / LESSON).read_text() == "my own notes", "what was committed"


def test_the_price_of_a_class_is_that_of_its_jobs_where_they_have_nodes_alone_and_where_they_share_them():
    rows = [line.split() for line in classroom.price(30, 2, 2).splitlines()]
    assert ["frontier", "batch", "normal", "1", "30", "60", "Frontier", "node-hours"] in rows
    assert ["perlmutter", "regular", "1", "30", "60", "GPU", "node-hours"] in rows
    assert ["perlmutter", "shared", "2", "15", "30", "GPU", "node-hours"] in rows, "two on a node of four GPUs"
    assert ["lumi", "small-g", "4", "8", "60", "GPU-hours"] in rows, "a GCD is half a GPU-hour an hour"
    rows = [line.split() for line in classroom.price(30, 2, 4).splitlines()]
    assert ["perlmutter", "shared"] not in [row[:2] for row in rows if row[2] != "(CPUs)"], "at most half a node"
    assert ["perlmutter", "shared", "(CPUs)", "16", "2", "3.75", "CPU", "node-hours"] in rows
    assert ["lumi", "small", "(CPUs)", "16", "2", "480", "CPU-core-hours"] in rows, "a core-hour for each of 8 cores"
    assert "not allowed: 2 h at most" in classroom.price(1, 3, 8, "frontier")
    with pytest.raises(BookError, match="must be more than 0"):
        classroom.price(0, 1, 1)


def test_a_folder_that_is_no_seat_is_refused(packed, tmp_path):
    with pytest.raises(BookError, match="has none of the class's notebooks: name the folder that notebooks/ is in"):
        classroom.reset(tmp_path, packed, yes=True)
    with pytest.raises(BookError, match="is not under git: name the class's archive with --from"):
        classroom.reset(tmp_path, yes=True)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are found by /proc")
def test_engines_that_a_seat_has_left_behind_are_ended_and_those_of_others_are_not(seat, packed, tmp_path):
    def engine(folder: Path, cluster: str) -> subprocess.Popen:
        env = {**os.environ, guard.MARKER: cluster}
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd=folder, env=env)

    (tmp_path / "elsewhere").mkdir()
    mine, other = engine(seat / "notebooks", "seat-7"), engine(tmp_path / "elsewhere", "seat-8")
    try:
        wait_until(lambda: classroom.engines(seat) == ["seat-7"], 20, "the engine runs")
        assert "1 clusters that still run" in classroom.reset(seat, packed, yes=True)
        assert mine.wait(20) < 0 and other.poll() is None
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()
