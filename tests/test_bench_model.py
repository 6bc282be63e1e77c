"""The model benchmark: ratios round by round, a fair comparison, and its output."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from aiscale.bench import timing
from aiscale.bench.model import (
    KERNELS,
    Size,
    _products,
    _require_same_loss,
    _same_in_transformers,
    _show_generation,
    _summary,
    bench_model,
    checks,
    peak_bytes,
)
from aiscale.bench.timing import paired
from aiscale.model import GPT

TINY = Size(n_layer=2, d_model=64, vocab_size=172, batch=2, seq_len=64)


@pytest.fixture(scope="module")
def quick_result() -> dict:
    return bench_model(quick=True)


def test_contenders_take_turns_and_the_warm_up_does_not_count():
    calls = []
    measured = paired({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=2)
    assert "".join(calls) == "cba" + "abc" + "cba"
    assert {name: len(seconds) for name, seconds in measured.seconds.items()} == {"a": 2, "b": 2, "c": 2}


def test_the_ratio_is_taken_round_by_round(monkeypatch):
    """A machine that becomes three times slower in the middle does not change the ratio."""
    now, slower = 0.0, iter([1, 1, 1, 1, 3, 3, 3, 3, 3, 3])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)

    def work(seconds):
        def step():
            nonlocal now
            now += seconds * next(slower)

        return step

    measured = paired({"one": work(1.0), "two": work(2.0)}, rounds=5, warmup=0)
    assert measured.ratio("two", "one") == 2.0
    assert measured.ratios("two", "one") == [2.0] * 5
    assert measured.median_s("one") == 3.0


def test_a_contender_half_as_fast_takes_twice_our_time(capsys):
    row = {"size": "s", "new_tokens": 100, "vocab_size": 1, "rounds": 2, "same_text": True}
    row |= _summary(timing.Paired(seconds={"ours": [0.5, 0.5], "theirs": [1.0, 1.0]}), 100)
    assert row["speedup"] == {"theirs": 2.0} and row["tokens_per_s"] == {"ours": 200, "theirs": 100}
    _show_generation(row)
    assert "10.00" in capsys.readouterr().out  # ms a token


@pytest.mark.extended
def test_the_quick_benchmark_measures_everything_and_checks_nothing(quick_result):
    (training,), (generation,) = quick_result["training"], quick_result["generation"]
    contenders = {"ours", "ours bf16", "transformers fair", "transformers default", "floor"}
    assert set(training["seconds"]) == contenders
    assert training["tokens_per_s"]["ours"] == pytest.approx(128 / training["seconds"]["ours"])
    assert training["speedup"].keys() == contenders - {"ours"}
    assert min(training["peak_memory_bytes"].values()) > 0
    assert generation["same_text"] and generation["new_tokens"] == 8
    assert [(row["what"], row["kernel"]) for row in quick_result["kernels"]] == [
        (what, kernel) for what, kernels in KERNELS.items() for kernel in kernels
    ]
    assert all(row["time_without"] > 0 for row in quick_result["kernels"])
    assert quick_result["checks"] == []
    assert json.loads(json.dumps(quick_result)) == quick_result


def test_checks_compare_values_with_their_targets():
    training = {
        "size": "s",
        "speedup": {"transformers fair": 0.99, "transformers default": 1.2, "ours bf16": 1 / 1.4},
        "peak_memory_bytes": {"ours": 90, "transformers fair": 100},
    }
    generation = {"size": "s", "speedup": {"transformers": 1.31}}
    found = {check["name"]: check["met"] for check in checks({"training": [training], "generation": [generation]})}
    assert found.pop("s: bf16 autocast over our fp32", False) is False
    assert found == {
        "s: speed over transformers, fair": False,
        "s: speed over transformers, default": True,
        "s: peak memory over transformers": True,
        "s: generation over transformers": True,
    }


def test_models_with_different_losses_are_not_compared():
    model = GPT(TINY.config())
    theirs = _same_in_transformers(model)
    tokens = torch.randint(0, 172, (2, 64))
    _require_same_loss(model, theirs, tokens)
    with torch.no_grad():
        theirs.transformer.wte.weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="the two models differ, so they cannot be compared"):
        _require_same_loss(model, theirs, tokens)


def test_the_floor_does_the_products_of_a_training_step():
    """Counted by torch: weights exactly; attention half, because of the causal mask."""
    model, tokens = GPT(TINY.config()), torch.zeros(2, 64, dtype=torch.long)
    with FlopCounterMode(display=False) as floor:
        _products(model, TINY)()
    with FlopCounterMode(display=False) as step:
        torch.nn.functional.linear(model.hidden(tokens), model.head_weight).sum().backward()
    attention = 2 * 2 * 64 * 64 * 64 * 6 * 2  # 2 per product term, batch x head, T, T, C, products, layers
    counts = step.get_flop_counts()["Global"]
    linear = sum(n for operation, n in counts.items() if str(operation) in ("aten.mm", "aten.addmm"))
    assert floor.get_total_flops() == linear + attention / 2


def test_peak_memory_holds_weights_gradients_moments_and_activations():
    state = 16 * GPT(TINY.config()).num_parameters()
    ours, theirs = (peak_bytes(TINY, contender) for contender in ("ours", "gelu_pytorch_tanh"))
    assert state < ours < theirs < 10 * state
