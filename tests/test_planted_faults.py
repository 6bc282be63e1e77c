"""Checks must fail on a bug: each fault is planted in a copy of the package, and the test that guards it must fail.

tests/faults.py plants faults of strategies for `aiscale verify`; these are the faults that it cannot detect.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import aiscale

TESTS = Path(__file__).parent

_LOST = """
def _lose_moments(self, state, real=Engine._load_optimizer):
    real(self, state)
    for moments in self.optimizer.state.values() if self.run.loop.precision in {precisions} else ():
        for name in ("exp_avg", "exp_avg_sq"):
            moments[name].zero_()
Engine._load_optimizer = _lose_moments
"""
#: fault -> (module, code appended to it, the test that must fail)
FAULTS = {
    "moments-lost": (
        "parallel/serial.py",
        _LOST.format(precisions=("fp32",)),
        "test_train.py::test_a_resumed_run_equals_one_that_never_stopped",
    ),
    "moments-lost-in-fp16": (
        "parallel/serial.py",
        _LOST.format(precisions=("fp16",)),
        "test_train.py::test_other_states_resume_to_the_bit_as_well",
    ),
    "batches-begin-anew": (
        "data/__init__.py",
        """
def _from_its_own_start(self, step, *rest, real=Batches.share):
    self.first = getattr(self, "first", step)
    return real(self, step - self.first, *rest)
Batches.share = _from_its_own_start
""",
        "test_train.py::test_a_resumed_run_equals_one_that_never_stopped",
    ),
    "meter-misses-a-tensor": (
        "meter.py",
        """
def held_bytes(held, real=held_bytes):
    return real({category: tensors[1:] for category, tensors in held.items()})
""",
        "test_bytes.py::test_serial_sends_and_holds_what_the_formulas_say",
    ),
    "cost-counts-a-collective-twice": (
        "cost/__init__.py",
        """
def step_traffic(*args, real=step_traffic, **keywords):
    return {what: 2 * sent_bytes for what, sent_bytes in real(*args, **keywords).items()}
""",
        "test_bytes.py::test_every_strategy_sends_and_holds_the_predicted_bytes[torch-plain]",
    ),
}
CHEAP = ("moments-lost",)


@pytest.mark.parametrize("fault", [f if f in CHEAP else pytest.param(f, marks=pytest.mark.extended) for f in FAULTS])
def test_a_planted_fault_turns_its_check_red(fault, tmp_path):
    module, added, check = FAULTS[fault]
    shutil.copytree(Path(aiscale.__file__).parent, tmp_path / "aiscale")
    with (tmp_path / "aiscale" / module).open("a") as file:
        file.write(f"\n\n{added}\n")
    # In a pytest-xdist worker, the inner test would wait for the lock that this one holds.
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env["PYTHONPATH"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(TESTS / check)],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1, done.stdout + done.stderr  # 1: tests failed; 2 and above: they did not run
    assert "AssertionError" in done.stdout or "assert " in done.stdout, done.stdout
