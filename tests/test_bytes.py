"""Predicted bytes equal measured bytes for every trainer: sent in a step and held by a rank."""

import pytest

from aiscale.measure import bytes as bytes_
from aiscale.measure.bytes import BYTE_CASES, compare
from aiscale.plan import cost
from aiscale.plan.options import run_of
from aiscale.train.options import TRAINERS, options


def differences(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["predicted"] != row["measured"]]


#: One of each library, at its smallest world.
PLAIN = ("serial", "ddp", "fsdp", "zero 2", "megatron tp2")


def check(plan) -> None:
    rows = compare(plan)
    assert differences(rows) == []
    for case, n in plan:
        mine = [row for row in rows if (row["case"], row["world_size"]) == (case.name, n)]
        assert {row["rank"] for row in mine} == set(range(n)), case.name
        sent = sum(row["measured"] for row in mine if row["kind"] == "payload")
        assert (sent > 0) == (n > 1), case.name
        assert all(row["measured"] > 0 for row in mine if row["kind"] == "held"), case.name


def test_a_trainer_of_each_library_sends_and_holds_the_predicted_bytes():
    check([(case, case.worlds[0]) for case in BYTE_CASES if case.name in PLAIN])


@pytest.mark.extended
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_trainer_sends_and_holds_the_predicted_bytes(trainer):
    check([(case, n) for case in BYTE_CASES if case.trainer == trainer for n in case.worlds])


def test_fsdp_sends_1_5_times_as_much_as_ddp():
    def on_the_ring(trainer: str, *words: str) -> float:
        words = ("--model", "tiny", "--length", "16", "--micro-batch", "4", *words)
        run = run_of(trainer, options(trainer).parse_args(words))
        sent = cost.step_traffic(run, 4)
        return sum(cost.wire_bytes(op, nbytes, 4) for (op, _), nbytes in sent.items())

    ddp = on_the_ring("ddp")
    # The root (embeddings and head) stays gathered from forward to backward: it is gathered once.
    assert 1.4 < on_the_ring("fsdp") / ddp < 1.5
    assert on_the_ring("zero", "--stage", "3") / ddp == pytest.approx(1.5, rel=1e-3)


def test_a_row_that_differs_is_shown_and_counted(monkeypatch, capsys):
    row = {
        "case": "ddp",
        "world_size": 2,
        "kind": "payload",
        "what": "all_reduce world",
        "predicted": 8,
    }
    rows = [{**row, "rank": rank, "measured": measured} for rank, measured in enumerate((8, 12, 8))]
    monkeypatch.setattr(bytes_, "compare", lambda plan: rows)
    assert bytes_.main(["ddp"]) == 1
    shown = capsys.readouterr().out
    assert [("DIFFERS" in line) for line in shown.splitlines() if "all_reduce world" in line] == [
        False,
        True,
    ]
    assert shown.endswith("3 rows of all ranks, 1 differ\n")
