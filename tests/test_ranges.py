"""The range plot shows exactly what a format loses, and the allocator's trace counts every byte."""

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from aiscale import cost, meter, plots
from aiscale.config import ModelConfig
from aiscale.model import GPT
from aiscale.plots.numbers import FORMATS, lost_share

matplotlib.use("agg")
KINDS = {kind.name: kind for kind in FORMATS}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("name", DTYPES)
def test_the_share_that_becomes_zero_matches_a_cast(name):
    kind = KINDS[name]
    edge = kind.smallest_normal * kind.step_at_one / 2
    values = torch.tensor([0.0, edge / 3, edge, edge * 1.01, -edge / 8, 1.0], dtype=torch.float64)
    lost = (values.to(DTYPES[name]) == 0) & (values != 0)
    assert lost_share(values.numpy(), kind) == lost.double().mean().item() == 3 / 6


def test_the_histogram_holds_every_number_but_zero_in_per_cent():
    numbers = np.array([0.0, 0.5, 0.6, -3.0])
    ax = plots.value_range({"gradient": numbers})
    curve = next(patch for patch in ax.patches if patch.get_label() == "_gradient")
    share, edges, _ = curve.get_data()
    assert share.sum() == pytest.approx(75)
    assert dict(zip(edges, share, strict=False))[-1.0] == pytest.approx(50)
    legend = ax.get_legend() or ax.figure.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["gradient: 0.0 % become 0"]
    plt.close("all")


def test_allocated_bytes_counts_what_work_allocates_and_frees(capfd):
    kept = []

    def work():
        kept.append(torch.zeros(1000))
        torch.zeros(5000)

    seconds, held = meter.allocated_bytes(work)
    assert max(held) == 24_000
    assert held[-1] == 4000
    assert seconds == sorted(seconds)
    assert capfd.readouterr().err == ""


def test_peak_memory_of_a_step_matches_cost_with_and_without_checkpointing():
    tokens = torch.zeros(4, 64, dtype=torch.int64)
    for checkpointing in (False, True):
        config = ModelConfig(
            n_layer=8, n_head=2, d_model=64, vocab_size=64, max_seq_len=64, activation_checkpointing=checkpointing
        )
        model = GPT(config)
        model(tokens, tokens).backward()  # so that gradients already exist
        _, held = meter.allocated_bytes(lambda model=model: model(tokens, tokens).backward())
        predicted = cost.activation_bytes(config, 4, 64)
        assert predicted < max(held) < 1.35 * predicted
