"""The allocator's trace counts every byte."""

import torch

from aiscale.lesson.model import GPT
from aiscale.measure import meter
from aiscale.plan import cost
from aiscale.plan.config import ModelConfig


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
            n_layer=8,
            n_head=2,
            d_model=64,
            vocab_size=64,
            max_seq_len=64,
            activation_checkpointing=checkpointing,
        )
        model = GPT(config)
        model(tokens, tokens).backward()  # so that gradients already exist
        _, held = meter.allocated_bytes(lambda model=model: model(tokens, tokens).backward())
        predicted = cost.activation_bytes(config, 4, 64)
        assert predicted < max(held) < 1.35 * predicted
