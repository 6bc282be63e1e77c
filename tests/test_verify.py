"""The ladder holds, and it would notice if a strategy were wrong."""

import json

import pytest

from aiscale.config import ConfigError
from aiscale.verify import RUNGS, Rung, climb, ladder
from ranks import aiscale


def test_every_strategy_gives_the_serial_result():
    done = aiscale("verify", "--json", timeout=280)
    verdicts = json.loads(done.stdout)
    assert done.returncode == 0, [v for v in verdicts if not v["holds"]]
    assert [v["rung"] for v in verdicts] == [rung.name for rung in RUNGS]
    for v in verdicts:
        # A difference of exactly 0 from another order of summation would mean that serial was compared with itself.
        assert (v["weight_difference"] == 0) == v["rung"].startswith("serial") or v["rung"] == "serial-accumulated"


@pytest.mark.parametrize(
    "mistake",
    [
        "loop.seed=1",  # other weights at the start
        "data.seed=1",  # other batches
        "optimizer.weight_decay=0.09",  # an optimizer that differs a little
        "optimizer.clip_norm=0.49",
    ],
)
def test_the_ladder_notices(mistake, monkeypatch):
    wrong = Rung(name="wrong", settings=(mistake,))
    monkeypatch.setattr(ladder, "RUNGS", (Rung(name="serial"), wrong))
    reference, verdict = climb()
    assert reference.holds and not verdict.holds and verdict.weight_difference > 100 * verdict.tolerance


def test_a_rung_whose_job_fails_does_not_hold_and_says_why(monkeypatch):
    broken = Rung(name="broken", settings=("parallel.strategy=mpi",))
    monkeypatch.setattr(ladder, "RUNGS", (Rung(name="serial"), broken))
    _, verdict = climb()
    assert not verdict.holds and "parallel.strategy mpi needs ranks that MPI started" in verdict.error


def test_an_unknown_rung_is_refused():
    with pytest.raises(ConfigError, match="unknown rung ddp-x9: it may be one of serial, "):
        climb(["ddp-x9"])
