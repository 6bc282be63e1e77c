"""Rules for all tests: without a GPU, tests that need one are skipped; in CI nothing else may skip.

`make test` runs three tests at a time (pytest-xdist), `make test-more` two, which have more ranks; each file on one
worker, the longest files first. A test marked `alone`, because it asserts on seconds, and every notebook run while no
other test does.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

# A shell starts what it puts in the background (`make test &`, nohup, some CI runners) with Ctrl-C ignored, and every
# process below inherits that: tests that interrupt a rank or a kernel would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

OUT_OF_TIME = "out of time"
IN_CI = os.environ.get("CI", "").lower() in ("1", "true")
#: Files that take more than half a minute, longest first: then both workers end at about the same time.
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


def pytest_collection_modifyitems(items):
    _skip_without_gpu(items)
    _skip_without_slurm(items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        rank = {f"test_{name}": i for i, name in enumerate(LONG)}
        items.sort(key=lambda item: (bool(item.get_closest_marker("notebook")), rank.get(item.path.stem, len(rank))))


def pytest_runtest_setup():
    """Skip and list tests that would start after the deadline, if one is set (.ci/run)."""
    if time.time() > float(os.environ.get("AISCALE_TESTS_END", "inf")):
        pytest.skip(OUT_OF_TIME)


def _alone(item) -> bool:
    return any(item.get_closest_marker(name) for name in ("alone", "notebook"))


def _skip_without_gpu(items):
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


def _skip_without_slurm(items):
    """In CI, tests that need Slurm fail without it, because CI installs it."""
    marked = [item for item in items if item.get_closest_marker("slurm")]
    if marked and not IN_CI:
        from aiscale.hpc import rehearsal

        if why_not := rehearsal.why_not():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=why_not))


class _Turns:
    """Tests share a lock that tests marked `alone` take exclusively. A waiting one blocks new tests, or it would
    wait until all others are done."""

    def __init__(self) -> None:
        self.lock, self.gate = (os.open(path, os.O_RDONLY) for path in (__file__, Path(__file__).parent))
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
    """Fail a test that skips in CI: CI installs what tests need, and nobody would notice the skip."""
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        if OUT_OF_TIME not in reason:
            report.outcome = "failed"
            report.longrepr = f"skipped, which CI does not allow: {reason}"
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
