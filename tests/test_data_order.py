"""The order of sequences does not depend on the number of ranks, nor on where a run goes on."""

from argparse import Namespace

import numpy as np
import pytest
import torch

from aiscale.train.data import Windows, batches

TOKENS = np.arange(1001, dtype=np.uint16)  # 100 sequences of 10: number i starts with token 10 i
STEPS = 36  #: three epochs of 12


def read(first=0, rank=0, world_size=1, tokens=TOKENS) -> list[torch.Tensor]:
    """Each step's share of one rank, (B / world_size, T + 1)."""
    args = Namespace(batch=8, steps=STEPS)
    return [rows for _, rows in batches(Windows(tokens, 10), first, args, rank, world_size)]


def test_a_sequence_has_one_token_more_which_begins_the_next():
    assert Windows(TOKENS, 10)[torch.tensor([3, 99])].tolist() == [
        list(range(30, 41)),
        list(range(990, 1001)),
    ]
    assert len(Windows(TOKENS[:11], 10)) == 1 and len(Windows(TOKENS[:10], 10)) == 0


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_all_ranks_together_read_the_same_batch_at_every_number_of_ranks(world_size):
    shares = [read(rank=rank, world_size=world_size) for rank in range(world_size)]
    for whole, *parts in zip(read(), *shares, strict=True):
        assert {len(part) for part in parts} == {8 // world_size}
        together = torch.stack(parts, dim=1).flatten(0, 1)
        assert torch.equal(together, whole)


def test_an_epoch_reads_no_sequence_twice_and_the_next_has_another_order():
    first = [(rows[:, 0] // 10).tolist() for rows in read()]
    epochs = [sum(first[start : start + 12], []) for start in range(0, STEPS, 12)]
    for epoch in epochs:
        assert len(set(epoch)) == 96
    assert epochs[0] != epochs[1] != epochs[2]
    assert set(epochs[0]) != set(epochs[1]), "those left over are others in every epoch"


def test_a_run_that_goes_on_in_the_middle_of_an_epoch_reads_what_it_would_have_read():
    for after, whole in zip(read(first=17), read()[17:], strict=True):
        assert torch.equal(after, whole)
