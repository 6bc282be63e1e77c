"""A process forked by the starter behaves like a fresh Python, on which other tests rely."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from ranks import forked

PROBE = """
import atexit, os, sys, threading, torch
print(__name__, __file__, sys.argv, os.getcwd(), os.environ.get("MINE"), os.environ.get("HOME"), sys.path[:2])
print(torch.get_num_threads(), threading.active_count(), sys.stdin.read(), os.isatty(1), "aiscale.train" in sys.modules)
print("an error", file=sys.stderr)
atexit.register(print, "at the end")
sys.exit(7)
"""


@pytest.mark.parametrize("threads", ["1", pytest.param("2", marks=pytest.mark.extended)])
def test_a_command_has_its_own_folder_environment_output_and_status(threads, tmp_path):
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "here").mkdir()
    env = {key: value for key, value in os.environ.items() if key != "HOME"}
    env |= {"MINE": "yes", "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": "1"}
    how = {"cwd": tmp_path / "here", "env": env, "timeout": 60}
    argv = ["-m", "probe", "an argument"]
    fresh = subprocess.run([sys.executable, *argv], capture_output=True, text=True, stdin=subprocess.DEVNULL, **how)
    for _ in range(2):  # the first run must not affect the second
        done = forked(argv, **how)
        assert (done.stdout, done.stderr, done.returncode) == (fresh.stdout, fresh.stderr, 7)


def test_a_command_that_times_out_is_killed_and_its_output_returned(tmp_path):
    (tmp_path / "endless.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    with pytest.raises(subprocess.TimeoutExpired) as expired:
        forked(["-m", "endless"], cwd=tmp_path, timeout=8)
    assert not psutil.pid_exists(int(expired.value.stdout))
    began = time.monotonic()
    assert forked(["-m", "aiscale", "no-such-command"], timeout=60).returncode == 2
    assert time.monotonic() - began < 30, "the starter goes on"
