"""Sixteen or eighteen bytes per parameter: sources' counts are reproduced, differences named."""

import pytest

from aiscale.plan import cost, published

PARTS = ("weights_32bit", "weights_16bit", "gradients", "moments")
#: who counts -> bytes of each part
COUNTS = {
    row["who_counts"]: {part: row[f"{part}_bytes"] for part in PARTS}
    for row in published.table("bytes_per_parameter")
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


def test_conventions_agree_with_the_functions_that_count_bytes():
    n = 1000
    assert sum(cost.zero_state_bytes(n, 0, 1).values()) == n * total("ZeRO paper")
    assert sum(cost.model_state_bytes(n, "adamw", "bf16").values()) == n * total(
        "autocast, during a step"
    )
    assert sum(cost.model_state_bytes(n, "sgd_plain").values()) == n * total("plain SGD, fp32")
    eight_bit = cost.model_state_bytes(n, "adamw8bit", "bf16")
    assert sum(eight_bit.values()) == n * total("slide, 8-bit AdamW")
