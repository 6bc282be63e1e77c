"""Appendix A8's pieces of Radius: which entries are chosen, packed and kept."""

import torch
from instruments.radius_masks import choose, largest, pack, positions, scores, unpack


def test_exactly_k_largest_entries_are_chosen_and_the_first_among_equals():
    chosen = largest(torch.tensor([0.0, 3, 0, 2, 0, 0]), 0.67)
    assert chosen.tolist() == [True, True, True, True, False, False]
    assert largest(torch.zeros(5), 0.4).tolist() == [True, True, False, False, False]
    assert largest(torch.tensor([1.0, 2.0]), 1).tolist() == [True, True]
    assert largest(torch.tensor([1.0, 2.0]), 0.01).tolist() == [False, True]  # at least one
    values = torch.randn(1001).abs()
    assert set(positions(largest(values, 0.4)).tolist()) == set(values.topk(400).indices.tolist())


def test_neighbours_are_taken_along_up_to_the_reach():
    scored = {"weight": torch.tensor([9.0, 0, 0, 0, 0, 8, 0])}
    masks = [choose(scored, density=0.3, reach=reach)["weight"] for reach in (0, 1, 9)]
    assert [mask.int().tolist() for mask in masks] == [
        [1, 0, 0, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 1, 1],
        [1] * 7,
    ]


def test_scores_are_the_steps_that_adam_took():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, 4, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.0)
    for _ in range(3):
        before = weight.detach().clone()
        weight.grad = torch.randn(5, 4, dtype=torch.float64)
        optimizer.step()
    moved = (weight.detach() - before).abs().flatten() / 0.01
    torch.testing.assert_close(scores(optimizer, weight), moved, rtol=1e-9, atol=1e-12)


def test_nothing_is_lost_between_what_is_sent_and_what_waits():
    residual, arrived = torch.zeros(2, 100)
    at = positions(torch.arange(100) % 3 == 0)
    gradients = torch.randn(20, 100, generator=torch.Generator().manual_seed(0))
    for gradient in gradients:
        received = torch.full((100,), torch.nan)
        unpack(received, at, pack(gradient, at, residual))
        arrived += received
    assert not residual[at].any()
    torch.testing.assert_close(arrived + residual, gradients.sum(0))
