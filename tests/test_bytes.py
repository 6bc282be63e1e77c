"""Predicted bytes equal measured bytes for every strategy: sent in a step and held by a rank."""

import json

import pytest

from aiscale import cost
from aiscale.verify import bytes as bytes_
from aiscale.verify.bytes import BYTE_CASES, ByteCase, compare
from ranks import run_ranks


def differences(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["predicted"] != row["measured"]]


#: The most informative world sizes of the byte table.
WORLDS = {"torch": (2, 3, 4, 5, 6, 7, 8), "deepspeed": (2, 3, 8), "megatron": (2, 3, 4, 8)}


def is_plain(case: ByteCase, n: int) -> bool:
    """A strategy by itself ("zero 2", not "zero 2 bf16"), at its smallest world."""
    return n == case.worlds[0] and len(case.name.split()) < 3


@pytest.mark.parametrize("plain", [True, pytest.param(False, marks=pytest.mark.extended)], ids=["plain", "others"])
@pytest.mark.parametrize("library", WORLDS)
def test_every_strategy_sends_and_holds_the_predicted_bytes(library, plain):
    cases = [case for case in BYTE_CASES if case.library == library]
    plan = [(case, n) for case in cases for n in case.worlds if n in WORLDS[library] or n == case.worlds[0]]
    plan = [(case, n) for case, n in plan if is_plain(case, n) == plain]
    rows = compare(plan)
    assert differences(rows) == []
    for case, n in plan:
        mine = [row for row in rows if (row["case"], row["world_size"]) == (case.name, n)]
        assert {row["rank"] for row in mine} == set(range(n)), case.name
        assert sum(row["measured"] for row in mine if row["kind"] == "payload") > 0, case.name
        assert all(row["measured"] > 0 for row in mine if row["kind"] == "held"), case.name


def test_serial_sends_and_holds_what_the_formulas_say(tmp_path):
    code = """
    import json
    from aiscale.verify.bytes import ByteCase, rows_of
    say(json.dumps(rows_of(ByteCase("it", ("parallel.strategy=serial",), (1,)), world)))
    """
    done = run_ranks(code, 1, tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert differences(rows) == [] and len(rows) == 3


def test_fsdp_sends_1_5_times_as_much_as_ddp():
    def on_the_ring(*settings: str) -> float:
        case = ByteCase("it", ("model.vocab_size=64", *settings), (4,), micro_batches=1)
        sent = cost.step_traffic(case.run(4), 4)
        return sum(cost.wire_bytes(op, nbytes, 4) for (op, _), nbytes in sent.items())

    ddp = on_the_ring("parallel.strategy=ddp")
    # The root unit (embeddings and last norm) stays gathered from forward to backward, so it is gathered once.
    assert 1.4 < on_the_ring("parallel.strategy=fsdp") / ddp < 1.5
    assert on_the_ring("parallel.strategy=zero", "parallel.zero_stage=3") / ddp == pytest.approx(1.5, rel=1e-3)
    assert on_the_ring("parallel.strategy=fsdp", "parallel.reshard_after_forward=false") / ddp == 1


def test_a_row_that_differs_is_shown_and_counted(monkeypatch, capsys):
    row = {"case": "ddp", "world_size": 2, "kind": "payload", "what": "all_reduce world", "predicted": 8}
    rows = [{**row, "rank": rank, "measured": measured} for rank, measured in enumerate((8, 12, 8))]
    monkeypatch.setattr(bytes_, "compare", lambda plan: rows)
    assert bytes_.main(["ddp"]) == 1
    shown = capsys.readouterr().out
    assert [("DIFFERS" in line) for line in shown.splitlines() if "all_reduce world" in line] == [False, True]
    assert shown.endswith("3 rows of all ranks, 1 differ\n")
