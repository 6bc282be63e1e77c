"""`aiscale verify` passes, and it detects a wrong strategy."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from aiscale.config import ConfigError
from aiscale.verify import CASES, Case, cases, verify
from ranks import aiscale

FAULTS = str(Path(__file__).with_name("faults.py"))

#: (fault, the case that it is planted in), one of each library
PLANTED = [
    ("all-reduce-skipped", "ddp-x2"),
    ("tensor-parallel-reduction-dropped", "tp2"),
    ("decay-applied-to-biases", "zero3-x2"),
]
#: the same, of each strategy and each thing that can go wrong
MORE = [
    ("rank-0-evaluates-alone", "ddp-x2"),
    ("gradient-times-the-world-size-in-fp32", "fsdp-x2-fp32"),
    ("unsent-gradients-forgotten", "radius-sparse-x3"),
    ("unsent-gradients-forgotten", "top-k-sparse-x3"),
    ("shards-not-reduced", "fsdp-x2"),
    ("gradient-doubled", "ddp-x2"),
    ("loss-divided-by-the-wrong-n", "ddp-x2"),
    ("loss-divided-by-the-wrong-n", "pp2-1f1b"),
    ("tied-embedding-gradient-not-reduced", "pp2-1f1b"),
    ("tied-embedding-gradient-not-reduced", "pp2-megatron"),
    ("qkv-swapped", "ddp-x2"),
    ("qkv-rows-in-the-wrong-order", "tp2"),
    ("decay-applied-to-biases", "ddp-x2"),
    ("learning-rate-off-by-one-step", "ddp-x2"),
    ("a-micro-batch-dropped", "ddp-x2-accumulated"),
    ("one-wrong-weight", "ddp-x2"),
]
#: one for each library
LIBRARIES = ["ddp-x2", "zero2-x2", "tp2"]
REPRESENTATIVES = [*LIBRARIES, "fsdp-x2", "pp2-1f1b"]


def verify_with_faults(pairs) -> dict:
    """The verdicts of (fault, case) pairs, by fault and case, from one call of `verify`."""
    faulty = [dataclasses.replace(CASES[case], name=f"{case}--{fault}") for fault, case in pairs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "PYTHON", (sys.executable, FAULTS))
        for case in faulty:
            patch.setitem(CASES, case.name, case)
        verdicts = verify([case.name for case in faulty])
    return {tuple(reversed(verdict.case.name.split("--"))): verdict for verdict in verdicts}


@pytest.fixture(scope="module")
def verdicts():
    return verify_with_faults([*PLANTED, *(("other-libraries-raise", case) for case in LIBRARIES)])


@pytest.fixture(scope="module")
def more_verdicts():
    others = [("own-library-raises", case) for case in REPRESENTATIVES]
    others += [("other-libraries-raise", case) for case in REPRESENTATIVES if case not in LIBRARIES]
    return verify_with_faults([("none", "ddp-x2"), *MORE, *others])


@pytest.mark.parametrize(("fault", "case"), PLANTED)
def test_a_planted_fault_fails_its_case(fault, case, verdicts):
    check_red(verdicts[fault, case])


@pytest.mark.parametrize("case", LIBRARIES)
def test_a_case_passes_whatever_the_other_libraries_do(case, verdicts):
    assert verdicts["other-libraries-raise", case].holds, verdicts["other-libraries-raise", case].error


@pytest.mark.extended
@pytest.mark.parametrize(("fault", "case"), MORE)
def test_each_planted_fault_fails_its_case(fault, case, more_verdicts):
    assert more_verdicts["none", "ddp-x2"].holds  # with the same machinery
    check_red(more_verdicts[fault, case])
    alone = fault == "rank-0-evaluates-alone"  # training is correct then: only the evaluations differ
    assert alone == (more_verdicts[fault, case].loss_difference < 1e-10)


def check_red(verdict):
    assert not verdict.holds
    if "micro-batch-dropped" in verdict.case.name:  # evaluations miss it too, and are compared by their tokens first
        assert verdict.error.startswith("RuntimeError: evaluations of (step, tokens) [(10, 192)")
        return
    # So far above fp32's tolerance that every case detects it.
    assert verdict.error == "" and max(verdict.differences) > 1e-4


@pytest.mark.extended
@pytest.mark.parametrize("case", REPRESENTATIVES)
def test_a_library_that_raises_fails_only_its_own_cases(case, verdicts, more_verdicts):
    verdicts = verdicts | more_verdicts
    assert verdicts["other-libraries-raise", case].holds, verdicts["other-libraries-raise", case].error
    verdict, strategy = verdicts["own-library-raises", case], CASES[case].strategy
    errors = f"RuntimeError: the library of {strategy} was entered", "ModuleNotFoundError: import of deepspeed halted"
    assert not verdict.holds and verdict.error.startswith(errors)


@pytest.mark.extended
@pytest.mark.timeout(1800)
def test_every_strategy_gives_the_serial_result():
    done = aiscale("verify", "--json", timeout=1800)
    verdicts = json.loads(done.stdout)
    assert done.returncode == 0, [v for v in verdicts if not v["holds"]]
    assert [v["case"] for v in verdicts] == list(CASES)
    for v in verdicts:
        # A difference of exactly 0 despite another order of summation would mean that serial was compared with itself.
        assert (v["weight_difference"] == 0) == (v["case"] == v["reference"]), v


def test_a_case_whose_job_fails_is_failed_with_the_reason(monkeypatch):
    broken = Case(name="broken", strategy="zero", ranks=2)
    monkeypatch.setitem(CASES, "broken", broken)
    (verdict,) = verify(["broken"])
    assert not verdict.holds and "loop.precision fp64 with parallel.strategy zero" in verdict.error


def test_cases_are_chosen_by_name_or_pattern():
    with pytest.raises(ConfigError, match=r"unknown case 'ddp-x9': did you mean ddp-x4\?"):
        verify(["ddp-x9"])
    assert aiscale("verify", "--list").stdout.split() == list(CASES)
    assert aiscale("verify", "fsdp*", "--list").stdout.split() == [name for name in CASES if name.startswith("fsdp")]
