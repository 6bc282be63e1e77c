"""Formulas against published tables, to the digits that are printed."""

import pytest

from aiscale.plan import cost, published
from aiscale.plan.config import ModelConfig

ZERO = published.table("zero_table1_model_states")
MEGATRON = published.table("megatron_sc21_table1")
MEMORY = published.table("peer_megatron_theoretical_memory")
MIB = 2**20


def last_digit(printed: float) -> float:
    """Half a unit of the last printed digit of a table's number."""
    text = f"{printed:g}"
    return 0.5 * 10.0 ** -len(text.partition(".")[2])


@pytest.mark.parametrize(
    "row", ZERO, ids=lambda row: f"{row['model']}-{row['dp_degree']}-stage{row['zero_stage']}"
)
def test_zeros_table_1(row):
    """Rajbhandari et al. 2020, table 1: it cuts digits off where it does not round them."""
    total = (
        sum(cost.zero_state_bytes(row["psi_params"], row["zero_stage"], row["dp_degree"]).values())
        / 1e9
    )
    assert total == pytest.approx(
        row["published_GB"], abs=2 * last_digit(row["published_GB"]) + 1e-9
    )


def shape(row) -> ModelConfig:
    sizes = {
        "n_layer": row["layers"],
        "n_head": row["heads"],
        "d_model": row["hidden"],
        "max_seq_len": row["seq"],
    }
    return ModelConfig(**sizes, vocab_size=row["vocab"])


@pytest.mark.parametrize("row", MEGATRON, ids=lambda row: f"{row['params_B']}B")
def test_megatrons_table_of_sc21(row):
    """Narayanan et al. 2021, table 1: parameters, FLOP/s with recomputation, the bubble.
    These are equations 2 and 3 there."""
    model, tokens = shape(row), row["global_batch"] * row["seq"]
    assert cost.parameter_count(model) / 1e9 == pytest.approx(row["params_B"], abs=0.051)
    layers = {
        part: flops
        for part, flops in cost.flops_by_part(model, row["seq"]).items()
        if part != "head"
    }
    # layers are computed twice
    flops = 4 / 3 * sum(layers.values()) + cost.flops_by_part(model, row["seq"])["head"]
    per_gpu = flops * tokens / row["iter_time_s_derived"] / row["gpus"] / 1e12
    assert per_gpu == pytest.approx(row["tflops_per_gpu"], abs=0.51)
    schedule = "interleaved" if row["virtual_stages_v"] > 1 else "1f1b"
    waiting = cost.bubble(schedule, row["pp"], row["n_microbatches_m"], row["virtual_stages_v"])
    assert waiting == pytest.approx(row["bubble_fraction_formula"], abs=1e-4)


CALCULATED = [row for row in MEMORY if row["recompute"] == "selective" and row["swiglu"] == "False"]


@pytest.mark.parametrize("row", CALCULATED, ids=lambda row: row["case"])
def test_activations_equal_those_of_megatrons_own_calculator(row):
    """Korthikanti et al. 2022 with sequence parallelism and selective recomputation.
    It is as Megatron-LM's theoretical_memory_usage.py prints it: plus the embedding's dropout, and
    on one stage the head's input and logits."""
    sizes = {"n_layer": row["layers"], "n_head": row["heads"], "d_model": row["hidden"]}
    model = ModelConfig(**sizes, vocab_size=row["padded_vocab"], max_seq_len=row["seq"])
    tokens, tp, pp, v = row["mbs"] * row["seq"], row["tp"], row["pp"], row["virtual_pp"]
    options = {"tp": tp, "sequence_parallel": True, "recompute": "selective"}
    total = cost.korthikanti_activation_bytes(model, row["mbs"], row["seq"], **options)
    total += tokens * pp * (8 + row["hidden"]) / tp
    total *= 1 + (pp - 1) / (pp * v) if v else min(1, row["num_microbatches"] / pp)
    if pp == 1:
        total += 4 * tokens * (row["hidden"] + row["padded_vocab"]) / tp
    assert total / MIB == pytest.approx(row["activation_MiB"], abs=0.0051)
