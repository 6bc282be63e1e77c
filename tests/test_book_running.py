"""Running notebooks: their environment, how they fail, and that no process is left."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest
from rich.console import Console

from aiscale import book
from aiscale.book import running
from aiscale.book.command import progress
from aiscale.book.running import Failure, Result
from aiscale.config import ConfigError
from aiscale.processes import marked
from answers import given_away
from lessons import code, lesson, prose, write

CONNECTION = "from ipykernel.connect import get_connection_info as how"


def run(tmp_path, *cells, parameters=None, imports="import os", name="03_small", **options):
    """Run a lesson of these cells; returns the result, and the executed copy if there is one."""
    write(lesson(*cells, imports=imports), tmp_path / "notebooks" / f"{name}.ipynb")
    (result,) = book.run([name], parameters, root=tmp_path / "notebooks", out=tmp_path / "build", **options)
    return result


@pytest.fixture(autouse=True)
def mark(monkeypatch):
    """A mark on everything that a test starts, because other notebooks may run on this machine at the same time."""
    monkeypatch.setenv("AISCALE_TEST", uuid.uuid4().hex)


def carriers() -> list[int]:
    return marked("AISCALE_TEST", os.environ["AISCALE_TEST"])


def printed(tmp_path, name="03_small") -> str:
    content = book.read(tmp_path / "build" / "notebooks" / f"{name}.ipynb")
    return "".join(o.text for cell in content.cells for o in cell.get("outputs", []) if o.output_type == "stream")


@pytest.mark.parametrize(
    "engines, job, queues", [("slurm", "", True), ("slurm", "7", False), ("local", "", False), ("/a/folder", "", False)]
)
def test_time_limits_include_the_queue_if_ranks_run_in_a_separate_job(monkeypatch, engines, job, queues):
    monkeypatch.setenv("AISCALE_ENGINES", engines)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    wait_s = running.QUEUE_S if queues else 0
    assert running.limits() == (120 + wait_s, 600 + wait_s)
    assert running.limits(5, 7) == (5, 7)


def test_a_notebook_runs_with_its_parameters_in_this_environment_offline_and_is_not_run_again(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_PATH", "/nonexistent")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "nobody"))
    tell = f"import sys\n\n{CONNECTION}\n\n"
    tell += "print(sys.executable, os.listdir(), os.environ['HF_HUB_OFFLINE'], how(unpack=True)['transport'])"
    result = run(tmp_path, tell, parameters={"steps": "7"}, resume=True)
    assert (result.state, result.failure, result.left_behind) == ("passed", None, 0)
    assert "posix 7 0.5 a True" in printed(tmp_path)
    assert f"{sys.executable} [] 1 ipc" in printed(tmp_path), "this Python, an empty folder, no port"
    kept = json.loads((tmp_path / "build/notebooks/results.json").read_text())["notebooks"]["03_small"]
    assert kept["parameters"] == {"steps": 7} and kept["cells"] == 4 and kept["seconds"] > 0

    copy = (tmp_path / "build/notebooks/03_small.ipynb").stat()
    assert run(tmp_path, tell, parameters={"steps": "7"}, resume=True).seconds == result.seconds
    assert (tmp_path / "build/notebooks/03_small.ipynb").stat() == copy, "it passed and nothing has changed"
    assert run(tmp_path, "print('changed')", parameters={"steps": "7"}, resume=True).state == "passed"
    assert "changed" in printed(tmp_path)


def test_the_core_path_leaves_optional_cells_out_and_shows_that_in_the_gallery(tmp_path):
    from aiscale.book.gallery import build_gallery  # loads nbconvert, which takes a second

    heading, cell = prose("## More (optional)"), code("print('an optional cell')", "optional")
    heading.metadata["tags"] = ["optional"]
    result = run(tmp_path, heading, cell, prose("## Next"), "print('a core cell')", core=True)
    assert (result.state, result.core, result.cells) == ("passed", True, 4)
    assert "a core cell" in printed(tmp_path) and "an optional cell" not in printed(tmp_path)
    build_gallery(tmp_path / "notebooks", tmp_path / "build")
    band = (tmp_path / "build/gallery/03_small.html").read_text().partition('<div class="optional"')[2]
    assert "an optional cell" in band.partition("Next")[0] and band.count("left out of this run") == 1


def test_a_run_that_is_stopped_at_a_section_runs_what_stands_above_it(tmp_path):
    cells = "print('above')", prose("## The second half"), "print('below')"
    result = run(tmp_path, *cells, until="the second HALF (optional)")
    assert (result.state, result.cells, result.until) == ("passed", 4, "the second HALF (optional)")
    assert "above" in printed(tmp_path) and "below" not in printed(tmp_path)
    assert not run(tmp_path, *cells, resume=True).until, "the whole lesson has not run yet"


def test_a_section_that_a_lesson_lacks_is_named_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match="no section is called 'Key point': did you mean 'Key points'?"):
        run(tmp_path, until="Key point")
    with pytest.raises(ConfigError, match="'x': there are 'Questions', 'You will be able to', 'Key points'"):
        run(tmp_path, until="x")


def test_an_answer_that_stands_above_its_prediction_is_found_in_the_executed_copy(tmp_path):
    imports = "import os\n\nfrom aiscale.book import predict"
    ask, measure = 'guess = predict("bytes of a step", None, unit="bytes")', "guess.against(2**12)"
    result = run(tmp_path, 'print(f"{2**12:,} bytes")', ask, measure, imports=imports, parameters={"steps": 4})
    said = "the answer to 'bytes of a step', 4096 bytes, stands above it: cell 8 shows 4,096 bytes"
    assert result.state == "passed" and given_away(book.read(result.executed)) == [(10, said)]


@pytest.mark.extended
def test_a_kernel_uses_ports_if_its_socket_file_names_would_be_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("n" * 100)))
    Path(tempfile.tempdir).mkdir()
    assert run(tmp_path, f"{CONNECTION}\n\nprint(how(unpack=True)['transport'])").state == "passed"
    assert "tcp" in printed(tmp_path)


def test_a_failing_cell_is_shown_with_its_number_its_text_and_its_traceback(tmp_path):
    fine = code("raise KeyError('on purpose')", "raises-exception")
    result = run(tmp_path, fine, prose(), "def divide(n):\n    return steps / n", "divide(0)", parameters={"steps": 5})
    failure = result.failure
    assert (result.state, failure.cell) == ("failed", 12)
    assert failure.message == "ZeroDivisionError: division by zero"
    assert "return steps / n" in failure.traceback and "\x1b" not in failure.traceback
    text = result.describe()
    assert "     1 | divide(0)" in text and text.endswith("03_small, cell 12: ZeroDivisionError: division by zero")
    assert "division by zero" in (tmp_path / "build/notebooks/03_small.ipynb").read_text(), "the copy is kept"


@pytest.mark.notebook
def test_a_failing_rank_is_shown_with_its_number_and_its_traceback(tmp_path):
    cells = ("ranks = cluster.start(2)", "%%px\nif rank == 1:\n    raise ValueError('the second')", "ranks.stop()")
    result = run(tmp_path, *cells, imports="import os\n\nfrom aiscale import cluster")
    assert result.failure.cell == 10
    assert "rank 1" in result.failure.message and "the second" in result.failure.message
    assert "raise ValueError('the second')" in result.failure.traceback
    assert carriers() == []


@pytest.mark.extended
@pytest.mark.notebook
def test_a_rank_that_is_killed_fails_the_notebook_and_is_named(tmp_path):
    cells = (
        "ranks = cluster.start(2)",
        "%%px\nimport signal\n\nif rank == 1:\n    signal.raise_signal(9)",
        "ranks.stop()",
    )
    result = run(tmp_path, *cells, imports="import os\n\nfrom aiscale import cluster")
    assert result.failure.cell == 10 and "rank 1" in result.failure.message
    assert carriers() == []


def test_a_notebook_with_a_cell_that_fails_on_purpose_passes(tmp_path):
    fine = code("raise ValueError('meant')", "raises-exception")
    assert run(tmp_path, fine, prose(), "print('still here')").state == "passed"
    assert "still here" in printed(tmp_path)


def test_a_cell_that_hangs_is_interrupted_and_shows_where(tmp_path):
    function = "def wait_for_ever():\n    while True:\n        time.sleep(0.1)"
    result = run(tmp_path, "import time", function, "wait_for_ever()", cell_timeout_s=6)
    assert result.failure.message == "the cell took longer than 6 s" and result.failure.cell == 12
    assert "time.sleep(0.1)" in result.failure.traceback and "KeyboardInterrupt" in result.failure.traceback


@pytest.mark.extended
def test_a_cell_that_ignores_its_interrupt_fails(tmp_path):
    cell = "import time\n\ntry:\n    time.sleep(1000)\nexcept KeyboardInterrupt:\n    print('so what')"
    result = run(tmp_path, cell, "print('later')", cell_timeout_s=6)
    assert result.failure.message == "the cell took longer than 6 s" and result.failure.cell == 8
    assert "so what" in result.failure.traceback and "later" not in printed(tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("what, limit", [("cell", "cell_timeout_s"), ("notebook", "timeout_s")])
def test_a_cell_or_notebook_that_cannot_be_interrupted_is_killed_at_its_time_out(tmp_path, monkeypatch, what, limit):
    monkeypatch.setattr(running, "INTERRUPT_S", 1.0)
    stubborn = "import signal\nimport time\n\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(1000)"
    result = run(tmp_path, stubborn, **{limit: 20})
    assert (result.state, result.failure.message) == ("failed", f"the {what} took longer than 20 s")
    assert carriers() == []


def test_a_kernel_that_dies_fails_the_notebook_within_seconds_and_leaves_nothing(tmp_path):
    sleeper = "import subprocess\n\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)"
    started = time.monotonic()
    result = run(tmp_path, sleeper, "os.kill(os.getpid(), 9)")
    assert result.failure.message == "the kernel died" and result.failure.cell == 10
    assert time.monotonic() - started < 120  # much less than the notebook's time-out
    assert result.left_behind == 1 and carriers() == []


def test_a_notebook_that_cannot_be_executed_at_all_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    result = run(tmp_path)
    assert (result.failure.message, result.failure.cell) == ("the process that ran it died", None)
    assert "No module named 'encodings'" in result.failure.traceback


def command(tmp_path, *arguments) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "aiscale", "notebooks", "--out", "build", *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore Ctrl-C; the command must not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(path, process) -> None:
    deadline = time.monotonic() + 180
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.1)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.extended), signal.SIGKILL]
)
def test_ending_the_command_ends_kernel_and_children_within_seconds(tmp_path, number):
    wait = f"from pathlib import Path\nfrom time import sleep\n\nPath({str(tmp_path / 'up')!r}).touch()\nsleep(1000)"
    write(lesson(wait), tmp_path / "notebooks" / "03_small.ipynb")
    process = command(tmp_path)
    wait_for(tmp_path / "up", process)
    process.send_signal(number)
    started = time.monotonic()
    out, err = process.communicate(timeout=60)
    while carriers() and time.monotonic() - started < 30:
        time.sleep(0.1)
    assert carriers() == [] and time.monotonic() - started < 30
    if number != signal.SIGKILL:
        assert process.returncode == 130 and "Traceback" not in err
        assert "03_small: interrupted" in err and "0 of 1 notebooks passed" in out


def test_the_command_runs_reports_and_builds_the_gallery(tmp_path):
    write(lesson(), tmp_path / "notebooks" / "00_good.ipynb")
    write(lesson("1 / 0", number="03"), tmp_path / "notebooks" / "03_bad.ipynb")
    process = command(tmp_path, "--gallery", "--json")
    out, err = process.communicate(timeout=120)
    tree = json.loads(out)
    assert process.returncode == 1 and [entry["state"] for entry in tree["notebooks"]] == ["passed", "failed"]
    assert "03_bad: failed in cell 8" in err and "     1 | 1 / 0" in err
    assert (tmp_path / "build/gallery/index.html").exists() and tree["gallery"] == "build/gallery/index.html"


def test_an_output_folder_that_cannot_be_written_is_refused(tmp_path):
    write(lesson(), tmp_path / "notebooks" / "03_small.ipynb")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written .*: name another folder with --out"):
        book.run(root=tmp_path / "notebooks", out=tmp_path / "file")


def test_the_table_shows_notebook_cell_seconds_and_state(tmp_path):
    for number in ("00", "03", "10"):
        write(lesson(number=number), tmp_path / f"{number}_x.ipynb")
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with progress(book.notebooks(root=tmp_path), console) as show:
        show("00_x", "runs", 0, None)
        show("00_x", "failed", 0, Result("00_x", "failed", 4.2, 3, failure=Failure("no", 6, "", "")))
        show("03_x", "runs", 0, None)
        show("03_x", "runs", 2, None)
    text = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", console.file.getvalue())
    # The table is drawn several times.
    last = {words[0]: words for line in text.splitlines() if (words := line.split())}
    assert (last["00_x"][1], last["00_x"][-2:]) == ("0/3", ["0:00:00", "failed"])
    assert (last["03_x"][1], last["03_x"][-2:]) == ("1/3", ["0:00:00", "runs"])
    assert (last["10_x"][1], last["10_x"][-2:]) == ("0/3", ["-:--:--", "waits"])


def test_without_a_terminal_each_start_and_end_prints_a_line(shelf, capsys):
    with progress(book.notebooks(root=shelf), Console(file=io.StringIO())) as show:
        show("03_ddp", "runs", 0, None)
        show("03_ddp", "runs", 1, None)
        show("03_ddp", "failed", 0, Result("03_ddp", "failed", 4.2, 3, failure=Failure("no", 6, "", "")))
        show("10_forge", "unchanged", 0, Result("10_forge", "passed", 4.2, 3))
    lines = ["03_ddp: runs", "03_ddp: failed in cell 6 after 4.2 s", "10_forge: passed earlier, unchanged since"]
    assert capsys.readouterr().err.splitlines() == lines
