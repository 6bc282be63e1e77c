"""The ladder holds, and it notices when a strategy is wrong."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from aiscale.config import ConfigError
from aiscale.verify import RUNGS, Rung, climb, jobs, rungs
from ranks import aiscale

FAULTS = str(Path(__file__).with_name("faults.py"))

#: (fault, the rung that it is planted in)
PLANTED = [
    ("all-reduce-skipped", "ddp-x2"),
    ("shards-not-reduced", "fsdp-x2"),
    ("gradient-doubled", "ddp-x2"),
    ("loss-divided-by-the-wrong-n", "ddp-x2"),
    ("loss-divided-by-the-wrong-n", "pp2-1f1b"),
    ("tensor-parallel-reduction-dropped", "tp2"),
    ("tied-embedding-gradient-not-reduced", "pp2-1f1b"),
    ("tied-embedding-gradient-not-reduced", "pp2-megatron"),
    ("qkv-swapped", "ddp-x2"),
    ("qkv-rows-in-the-wrong-order", "tp2"),
    ("decay-applied-to-biases", "ddp-x2"),
    ("decay-applied-to-biases", "zero3-x2"),
    ("learning-rate-off-by-one-step", "ddp-x2"),
    ("a-micro-batch-dropped", "ddp-x2-accumulated"),
    ("one-wrong-weight", "ddp-x2"),
]
#: of every library
REPRESENTATIVES = ["ddp-x2", "fsdp-x2", "pp2-1f1b", "zero2-x2", "tp2"]


def climb_with_faults(pairs) -> dict:
    """The verdicts of (fault, rung) pairs, by fault and rung, from one climb."""
    faulty = [dataclasses.replace(RUNGS[rung], name=f"{rung}--{fault}") for fault, rung in pairs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rungs, "PYTHON", (sys.executable, FAULTS))
        for rung in faulty:
            patch.setitem(RUNGS, rung.name, rung)
        verdicts = climb([rung.name for rung in faulty])
    return {tuple(reversed(verdict.rung.name.split("--"))): verdict for verdict in verdicts}


@pytest.fixture(scope="module")
def verdicts():
    libraries = [(f, rung) for f in ("own-library-raises", "other-libraries-raise") for rung in REPRESENTATIVES]
    return climb_with_faults([("none", "ddp-x2"), *PLANTED, *libraries])


def test_without_a_fault_the_same_machinery_is_green(verdicts):
    assert verdicts["none", "ddp-x2"].holds


@pytest.mark.parametrize(("fault", "rung"), PLANTED)
def test_a_planted_fault_turns_its_rung_red(fault, rung, verdicts):
    verdict = verdicts[fault, rung]
    assert not verdict.holds and verdict.error == ""
    # So far above the tolerance of fp32 that no rung is too coarse to see it.
    assert max(verdict.loss_difference, verdict.norm_difference, verdict.weight_difference) > 1e-4


@pytest.mark.parametrize("rung", REPRESENTATIVES)
def test_a_library_that_raises_turns_exactly_its_own_rungs_red(rung, verdicts):
    assert verdicts["other-libraries-raise", rung].holds, verdicts["other-libraries-raise", rung].error
    verdict, strategy = verdicts["own-library-raises", rung], RUNGS[rung].strategy
    assert not verdict.holds and verdict.error == f"RuntimeError: the library of {strategy} was entered"


@pytest.mark.timeout(1800)
def test_every_strategy_gives_the_serial_result():
    done = aiscale("verify", "--json", timeout=1800)
    verdicts = json.loads(done.stdout)
    assert done.returncode == 0, [v for v in verdicts if not v["holds"]]
    assert [v["rung"] for v in verdicts] == list(RUNGS)
    for v in verdicts:
        # A difference of exactly 0 from another order of summation would mean that serial was compared with itself.
        assert (v["weight_difference"] == 0) == (v["rung"] == v["reference"]), v


def test_a_rung_whose_job_fails_does_not_hold_and_says_why(monkeypatch):
    broken = Rung(name="broken", strategy="mpi", ranks=2)
    monkeypatch.setitem(RUNGS, "broken", broken)
    (verdict,) = climb(["broken"])
    assert not verdict.holds and "parallel.strategy mpi needs ranks that MPI started" in verdict.error


def test_a_job_that_does_not_end_is_ended(monkeypatch):
    endless = Rung(name="endless", strategy="ddp", ranks=2, options="loop.steps=1000000")
    monkeypatch.setitem(RUNGS, "endless", endless)
    real = jobs.Jobs.run

    def run(self, rung, *rest):  # its reference comes to its end, however long that takes
        monkeypatch.setattr(jobs, "TIMEOUT_S", 5 if rung is endless else 180)
        return real(self, rung, *rest)

    monkeypatch.setattr(jobs.Jobs, "run", run)
    (verdict,) = climb(["endless"])
    assert verdict.error == "no end after 5 s" and verdict.seconds < 80


def test_rungs_are_chosen_by_name_or_pattern():
    with pytest.raises(ConfigError, match="unknown rung ddp-x9: it may be one of serial-gpt2-fp64, "):
        climb(["ddp-x9"])
    done = aiscale("verify", "--list")
    assert done.stdout.split() == list(RUNGS)
