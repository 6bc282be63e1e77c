"""Figure 2 and table 5 of the Turing report: what is stored is what the planner says."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "benchmarks/planner/turing.py"


@pytest.fixture(scope="module")
def turing():
    spec = importlib.util.spec_from_file_location("turing_figure", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_the_stored_ratios_are_the_planners(turing):
    stored = json.loads(turing.STORED.read_text())
    again = {"rows": turing.rows(), "table_5": turing.table_5(), "memory": turing.memory()}
    again["lines"] = turing.lines(again["rows"], again["table_5"])
    kept = {name: stored[name] for name in again}
    assert kept == again, "run: python benchmarks/planner/turing.py --store"


def test_a_ratio_divides_the_times_that_it_names_and_a_miss_is_counted_from_the_nearest_end(turing):
    rows = {row["ratio"]: row for row in turing.rows()}
    v100 = rows["V100 over A100"]
    expected = [
        turing.Case(machine="V100", batch=batch).seconds_a_sequence()
        / turing.Case(machine="A100", batch=batch).seconds_a_sequence()
        for batch in (64, 128)
    ]
    assert v100["predicted"] == pytest.approx([min(expected), max(expected)], abs=1e-3)
    assert rows["16 bits over 32 bits, gpt2, A100"]["published"] == [0.85, 0.92], "8 to 15 % less"
    for row in rows.values():
        low, high = row["published"]
        middle = (row["predicted"][0] * row["predicted"][1]) ** 0.5
        outside = middle / low - 1 if middle < low else max(0.0, middle / high - 1)
        assert row["outside_pct"] == pytest.approx(100 * outside, abs=0.2)


def test_a_gelu_written_out_is_the_same_function_and_keeps_four_times_as_much(turing):
    x = torch.randn(64)
    torch.testing.assert_close(turing.gelu_written_out(x), turing.gelu_of_one_operation(x))
    # one: its input and its output. written out: the power's input, tanh and 1 + tanh in fp32, and
    # x / 2 and the output in fp16
    assert turing.kept_bytes(turing.gelu_of_one_operation) == 2 + 2
    assert turing.kept_bytes(turing.gelu_written_out) == 4 + 4 + 4 + 2 + 2
    needed = turing.memory()
    assert needed["planned_gb"] < needed["capacity_gb"] < needed["with_it_gb"]
