"""Sixteen or eighteen bytes per parameter: every source's count is reproduced, and the differences have names."""

import pytest

from aiscale import cost, published
from aiscale.config import ModelConfig

PARTS = ("weights_32bit", "weights_16bit", "gradients", "moments")
#: who counts -> bytes of each part
COUNTS = {
    row["who_counts"]: {part: row[f"{part}_bytes"] for part in PARTS} for row in published.table("bytes_per_parameter")
}


def total(name):
    return sum(COUNTS[name].values())


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("ZeRO paper", 16),
        ("ZeRO-2 estimator", 20),
        ("ZeRO-3 estimator", 18),
        ("slide, AdamW", 18),
        ("slide, SGD with momentum", 14),
        ("slide, 8-bit AdamW", 12),
        ("slide, fp32 AdamW", 16),
        ("Megatron-Core, bf16", 18),
        ("plain SGD, fp32", 8),
    ],
)
def test_each_convention_adds_up_to_what_its_source_says(name, nbytes):
    assert total(name) == nbytes


def test_sixteen_and_eighteen_differ_only_in_the_gradients():
    paper, slide, plain = COUNTS["ZeRO paper"], COUNTS["slide, AdamW"], COUNTS["slide, fp32 AdamW"]
    assert {**slide, "gradients": slide["gradients"] - 2} == paper
    # Sixteen for two reasons: the paper's 2 + 2 + 12 and fp32's 4 + 4 + 8.
    assert (plain["weights_16bit"] - paper["weights_16bit"], plain["gradients"] - paper["gradients"]) == (-2, 2)


def test_conventions_agree_with_the_functions_that_count_bytes():
    n = 1000
    assert sum(cost.zero_state_bytes(n, 0, 1).values()) == n * total("ZeRO paper")
    assert sum(cost.model_state_bytes(n, "adamw", "bf16").values()) == n * total("autocast, during a step")
    assert sum(cost.model_state_bytes(n, "sgd_plain").values()) == n * total("plain SGD, fp32")
    eight_bit = cost.model_state_bytes(n, "adamw8bit", "bf16")
    assert sum(eight_bit.values()) == n * total("slide, 8-bit AdamW")


def test_the_slides_table_is_made_of_the_same_parts():
    slide = {(row["category"], row["case"]): row["bytes"] for row in published.table("slide_bytes_per_parameter")}
    adamw = COUNTS["slide, AdamW"]
    assert slide["parameters", "mixed precision"] == adamw["weights_32bit"] + adamw["weights_16bit"]
    assert slide["gradients", "fp32 or mixed precision"] == adamw["gradients"]
    assert slide["optimizer states", "8-bit AdamW"] == COUNTS["slide, 8-bit AdamW"]["moments"]


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"norm": "rmsnorm", "position": "rotary", "activation": "swiglu", "tied": False, "n_head": 4, "n_kv_head": 2},
        {"bias": False},
    ],
)
def test_parameter_shapes_match_the_model(switches):
    from aiscale.model import GPT

    config = ModelConfig(n_layer=2, d_model=32, vocab_size=67, max_seq_len=16, **switches)
    real = {name: tuple(parameter.shape) for name, parameter in GPT(config).named_parameters()}
    assert list(cost.parameter_shapes(config).items()) == list(real.items())
