"""The order of windows depends only on seed and step: not on the world size, nor on a resume."""

import numpy as np
import pytest
import torch

from aiscale.errors import ConfigError
from aiscale.train.prepare import Batches
from aiscale.train.prepare.order import permute

TOKENS = np.arange(1001, dtype=np.uint16)  # 100 windows of 10: window i starts with token 10 i


def batches(global_batch=8, seed=1, tokens=TOKENS, seq_len=10) -> Batches:
    return Batches(tokens, seq_len=seq_len, global_batch=global_batch, seed=seed)


def windows(x) -> list[int]:
    return (x[:, 0] // 10).tolist()


def test_targets_are_the_tokens_one_further_on():
    x, y = batches().batch(3)
    assert x.shape == y.shape == (8, 10) and x.dtype == y.dtype == torch.int64
    assert torch.equal(y, x + 1)
    assert x.is_contiguous() and y.is_contiguous()


@pytest.mark.parametrize(("world", "n_micro"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 2), (8, 1)])
def test_all_ranks_together_read_the_same_global_batch_at_every_world_size(world, n_micro):
    order = batches()
    for step in (0, 5, 12, 40):
        shares = [order.share(step, rank, world, n_micro) for rank in range(world)]
        assert all(len(share) == n_micro for share in shares)
        x, y = order.batch(step)
        assert torch.equal(torch.cat([x for share in shares for x, _ in share]), x)
        assert torch.equal(torch.cat([y for share in shares for _, y in share]), y)


def test_an_epoch_visits_no_window_twice_and_the_next_epoch_has_another_order():
    order = batches()
    assert order.steps_per_epoch == 12
    epochs = [
        [w for step in range(e * 12, e * 12 + 12) for w in windows(order.batch(step)[0])]
        for e in range(3)
    ]
    for epoch in epochs:
        assert len(set(epoch)) == 96
    assert epochs[0] != epochs[1] != epochs[2]
    assert set(epochs[0]) != set(epochs[1]), "the windows left over are others in every epoch"


def test_a_step_in_the_middle_of_an_epoch_needs_no_state():
    walked = batches()
    for step in range(17):
        walked.batch(step)
    assert torch.equal(walked.batch(17)[0], batches().batch(17)[0])


def test_evaluation_reads_the_windows_one_after_another():
    order = Batches(TOKENS, seq_len=10, global_batch=8, seed=None)
    assert windows(order.batch(0)[0]) == list(range(8))
    assert windows(order.batch(2)[0]) == list(range(16, 24))
    assert order.steps_per_epoch == 12


def test_tokens_for_one_window_suffice_and_one_fewer_is_refused_with_the_numbers():
    x, y = batches(global_batch=1, tokens=TOKENS[:11]).batch(0)
    assert (x[0].tolist(), y[0].tolist()) == (list(range(10)), list(range(1, 11)))
    with pytest.raises(
        ConfigError,
        match="has 10 tokens, fewer than one block of loop.seq_len 10 and its last target",
    ):
        batches(tokens=TOKENS[:10])


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 100, 257, 4096, 5000])
def test_the_order_is_a_permutation(n):
    assert sorted(permute(np.arange(n), n, 1337, 3)) == list(range(n))


def test_the_order_never_changes_with_a_new_version_of_anything():
    # A run stopped under one version of numpy or of this package may resume under another.
    assert permute(np.arange(10), 10, 1337, 0).tolist() == [6, 1, 0, 9, 4, 3, 5, 7, 8, 2]
    found = permute(np.arange(5), 10**9, 1337, 2).tolist()
    assert found == [732719684, 815245956, 212932661, 605075245, 769620101]
