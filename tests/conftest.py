"""Rules for all tests: what a test needs and this machine lacks (a GPU, Slurm, a browser) skips it.

AISCALE_NO_SKIPS=1 fails a test that skips, but for a GPU or a file without a licence: .ci/run sets
it in the end. `--skipped-to FILE` writes the names of the tests that skipped, to run them later as
`pytest @FILE`; `--changed-since COMMIT` leaves out the tests whose file names nothing that has
changed since.

`make test` and `make test-more` run two tests at a time (pytest-xdist), each file on one worker,
the longest files first. A test marked `alone`, because it asserts on seconds, and every notebook
run while no other test does.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

# A shell starts what it puts in the background (`make test &`, nohup, some CI runners) with Ctrl-C
# ignored, and every process below inherits that: tests that interrupt a rank or a kernel would wait
# for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

OUT_OF_TIME, NO_LICENCE = "out of time", "no licence"
NO_SKIPS = os.environ.get("AISCALE_NO_SKIPS") == "1"
#: Files that take more than half a minute, longest first: then both workers end at about the same
#: time.
LONG = (
    "verify",
    "slurm_engines",
    "bytes",
    "launched",
    "rehearsal",
    "cluster",
    "jupyterhub",
    "saving",
    "soak",
    "radius",
    "hang",
)


def pytest_addoption(parser):
    parser.addoption(
        "--skipped-to", type=Path, help="a file for the names of the tests that skipped, one a line"
    )
    parser.addoption(
        "--changed-since", help="a commit: only tests whose file names what has changed since"
    )


def pytest_collection_modifyitems(config, items):
    if commit := config.getoption("--changed-since"):
        _keep_touched(config, items, commit)
    _skip_without_gpu(items)
    _skip_without_slurm(items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        rank = {f"test_{name}": i for i, name in enumerate(LONG)}
        items.sort(
            key=lambda item: (
                bool(item.get_closest_marker("notebook")),
                rank.get(item.path.stem, len(rank)),
            )
        )


def pytest_runtest_setup():
    """Skip and list tests that would start after the deadline, if one is set (.ci/run)."""
    if time.time() > float(os.environ.get("AISCALE_TESTS_END", "inf")):
        pytest.skip(OUT_OF_TIME)


def _alone(item) -> bool:
    return any(item.get_closest_marker(name) for name in ("alone", "notebook"))


def _keep_touched(config, items, commit):
    """Keep a test if its file has changed, or has the stem of a changed file in it as a word.
    For `__init__.py` that is the folder's name; of the notebooks, only changed ones are kept."""
    command = ["git", "-C", Path(__file__).parent, "diff", "--name-only", commit, "HEAD"]
    diff = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    changed = [Path(name) for name in diff.splitlines()]
    stems = {path.parent.name if path.stem == "__init__" else path.stem for path in changed}
    words = re.compile(rf"\b({'|'.join(map(re.escape, sorted(stems)))})\b" if stems else r"(?!)")
    texts = {path: path.read_text() for path in {item.path for item in items}}
    names = {path.name for path in changed}
    kept = [i for i in items if i.path.name in names or words.search(f"{i.name} {texts[i.path]}")]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_sessionfinish(session, exitstatus):
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption(
        "--changed-since"
    ):
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter, config):
    if path := config.getoption("--skipped-to"):
        skipped = {report.nodeid for report in terminalreporter.stats.get("skipped", [])}
        path.write_text("".join(f"{name}\n" for name in sorted(skipped)))


def _skip_without_gpu(items):
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


def _skip_without_slurm(items):
    marked = [item for item in items if item.get_closest_marker("slurm")]
    if marked:
        import rehearsal

        if why_not := rehearsal.why_not():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=why_not))


class _Turns:
    """Tests share a lock that tests marked `alone` take exclusively.
    A waiting one blocks new tests, or it would wait until all others are done."""

    def __init__(self) -> None:
        self.lock, self.gate = (
            os.open(path, os.O_RDONLY) for path in (__file__, Path(__file__).parent)
        )
        self.kept = False

    def take(self, alone: bool) -> None:
        if not self.kept:
            fcntl.flock(self.gate, fcntl.LOCK_EX)
            fcntl.flock(self.lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            fcntl.flock(self.gate, fcntl.LOCK_UN)

    def give(self, keep: bool) -> None:
        self.kept = keep
        if not keep:
            fcntl.flock(self.lock, fcntl.LOCK_UN)


_turns = _Turns()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-timeout starts its clock
def pytest_runtest_protocol(item, nextitem):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    _turns.take(_alone(item))
    result = yield
    _turns.give(keep=nextitem is not None and _alone(item) and _alone(nextitem))
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    return report if item.get_closest_marker("gpu") else _no_skip(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    return _no_skip(report)


def _no_skip(report):
    """Fail a test that skips where all that tests need is there: nobody would notice the skip."""
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        if OUT_OF_TIME not in reason and NO_LICENCE not in reason:
            report.outcome = "failed"
            report.longrepr = f"skipped, though AISCALE_NO_SKIPS is set: {reason}"
    return report


@pytest.fixture(scope="session", autouse=True)
def folders(tmp_path_factory):
    """Create the base folder of all tests early: concurrent threads would each make their own."""
    tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def frontier():
    from centre import Cluster  # most tests need none

    with Cluster(site="frontier", nodes=2) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def perlmutter():
    from centre import Cluster

    with Cluster(site="perlmutter", nodes=2) as nodes:
        yield nodes


@pytest.fixture
def place():
    """A folder that all virtual nodes see: not below /tmp, which is private to each node."""
    folder = Path(tempfile.mkdtemp(prefix="aiscale-test-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def shelf(tmp_path):
    from lessons import lesson, write  # most tests need no notebooks

    for number, name in (("00", "start"), ("03", "ddp"), ("10", "forge")):
        write(lesson(number=number), tmp_path / "notebooks" / f"{number}_{name}.ipynb")
    return tmp_path / "notebooks"
