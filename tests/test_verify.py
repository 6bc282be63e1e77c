"""`aiscale verify` passes, and it detects a wrong trainer."""

import json
import subprocess
import sys

import pytest

from aiscale.errors import ConfigError
from aiscale.measure import cases
from aiscale.measure.cases import CASES, Case
from aiscale.measure.jobs import verify
from faults import FIRST, MORE, NONE, planted
from ranks import aiscale


def verdicts_of(faults, folder) -> dict:
    """{fault: verdict}, from one call of `verify`."""
    faulty = {fault: planted(fault, folder) for fault in faults}
    with pytest.MonkeyPatch.context() as patch:
        for case in faulty.values():
            patch.setitem(CASES, case.name, case)
        verdicts = {
            verdict.case.name: verdict
            for verdict in verify([case.name for case in faulty.values()])
        }
    return {fault: verdicts[case.name] for fault, case in faulty.items()}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    return verdicts_of([NONE, *FIRST], tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="module")
def more_verdicts(request, tmp_path_factory):
    """Of the faults that are asked for: `-k NAME` plants that one alone."""
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    faults = [each["fault"] for each in chosen if each.get("fault") in MORE]
    return verdicts_of(faults, tmp_path_factory.mktemp("planted"))


def name_of(fault) -> str:
    return f"{fault.case}--{fault.name}"


def check_red(verdict):
    """So far off that no rounding explains it."""
    assert not verdict.holds and verdict.error == "", verdict
    assert max(found / allowed for found, allowed in verdict.differences) > 10, verdict


def test_a_copy_without_a_fault_passes(verdicts):
    assert verdicts[NONE].holds, verdicts[NONE]


@pytest.mark.parametrize("fault", FIRST, ids=name_of)
def test_a_planted_fault_fails_its_case(fault, verdicts):
    check_red(verdicts[fault])


@pytest.mark.extended
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", MORE, ids=name_of)
def test_each_planted_fault_fails_its_case(fault, more_verdicts):
    verdict = more_verdicts[fault]
    check_red(verdict)
    if fault.name == "rank-0-evaluates-alone":  # training is correct then
        assert verdict.loss_difference < 1e-10 < verdict.eval_difference


@pytest.mark.extended
@pytest.mark.timeout(2400)
def test_every_trainer_gives_the_serial_result():
    # A new Python: jobs that its threads fork at once could lock each other.
    command = [sys.executable, "-m", "aiscale", "verify", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2400)
    verdicts = json.loads(done.stdout)
    assert done.returncode == 0, [v for v in verdicts if not v["holds"]]
    assert [v["case"] for v in verdicts] == list(CASES)
    for v in verdicts:
        # Exactly 0 despite another order of summation: a run would have been compared with itself.
        assert (v["weight_difference"] == 0) == (v["case"] == v["reference"]), v


def test_a_case_whose_job_fails_is_failed_with_the_reason(monkeypatch, capsys):
    # in fp64
    monkeypatch.setitem(CASES, "broken", Case("broken", "megatron", 2, "--tp 2 --pp 1", 6))
    (verdict,) = verify(["broken"])
    assert not verdict.holds and "--fp64: Megatron-Core computes the loss in fp32" in verdict.error


def test_a_red_case_says_how_the_referee_looks_into_it():
    command = CASES["tp_pp-tp2-pp2"].referee()
    start, _, options = command.partition(" -- ")
    assert start == "aiscale verify -m aiscale.train.tp_pp --nproc 4"
    assert options == "--tp '{min(2,N)}' --pp '{min(2,N)}' --micro-batch 1 --save '{TMP}/run'"


def test_cases_are_chosen_by_name_or_pattern():
    with pytest.raises(ConfigError, match=r"unknown case 'ddp-x9': did you mean ddp-x4\?"):
        verify(["ddp-x9"])
    assert aiscale("verify", "--list").stdout.split() == list(CASES)
    fsdp = [name for name in CASES if name.startswith("fsdp")]
    assert aiscale("verify", "fsdp*", "--list").stdout.split() == fsdp


def test_every_trainer_has_a_case():
    from aiscale.train.options import TRAINERS

    assert {case.trainer for case in CASES.values()} >= set(TRAINERS)
    assert max(cases.text()) < cases.TOKENS
