"""Graders of the exercises on ZeRO: pieces are compared with labelled numbers, training with one process and AdamW."""

import random

import numpy as np
import torch

from aiscale import cost
from aiscale.lesson.grading import exercise, require, same_on_ranks

# 04.1 ---------------------------------------------------------------------------------------------------------------


def labels(sizes: list[int]) -> list[tuple[int, int]]:
    """Each number of each tensor, end to end: (tensor, position)."""
    return [(tensor, position) for tensor, size in enumerate(sizes) for position in range(size)]


def dealt(sizes: list[int], ranks: int) -> list[list[tuple[int, int]]]:
    """The numbers of each rank: padded, and cut into equal rows by numpy."""
    row = np.arange(sum(sizes))
    padded = np.pad(row, (0, -len(row) % ranks), constant_values=-1).reshape(ranks, -1)
    return [[labels(sizes)[i] for i in share if i >= 0] for share in padded]


def misdealt(sizes: list[int], ranks: int) -> dict[str, list[list[tuple[int, int]]]]:
    """What mistakes give."""
    total, every = sum(sizes), labels(sizes)
    small, shares = total // ranks, range(ranks)
    balanced = [[every[i] for i in part] for part in np.array_split(np.arange(total), ranks)]
    each = [-(-size // ranks) for size in sizes]
    on_its_own = [[(t, i) for t, i in every if i // each[t] == rank] for rank in shares]
    dropped = [every[rank * small : (rank + 1) * small] for rank in shares]
    to_last = [*dropped[:-1], every[(ranks - 1) * small :]]
    return {
        f"{total % ranks} numbers at the end have no owner: pad the row, so round the share up": dropped,
        f"the last rank takes the rest: pad the row, so that all shares have {-(-total // ranks)}": to_last,
        "the shares differ by one, with the larger ones first: pad the row at its end, and cut it equally": balanced,
        "each tensor is cut on its own, as FSDP does: lay them end to end first": on_its_own,
    }


@exercise(
    "04.1",
    "Whose numbers are these?",
    "pieces",
    minutes=8,
    hints=[
        "In the long row a rank owns rank x share to (rank + 1) x share. Where in that row does each tensor begin?",
        "Subtract that place from both ends of the share: now they count from the tensor's own beginning.",
        "What is below 0 or above the tensor's size lies in other tensors: cut it off with max and min.",
    ],
)
def whose_numbers(pieces):
    for _ in range(4):
        ranks = random.randint(3, 6)
        sizes = [random.randint(2, 9), random.randint(2, 9), random.randint(15, 40), random.randint(2, 9)]
        random.shuffle(sizes)
        sizes[-1] += (1 - sum(sizes)) % ranks  # one number too many, so that the padding matters
        right, wrong = dealt(sizes, ranks), misdealt(sizes, ranks)
        found = [pieces(sizes, rank, ranks) for rank in range(ranks)]
        where = f"tensors of {sizes} on {ranks} ranks"
        mine = [expanded(list(owned), sizes, f"{where}, rank {rank}") for rank, owned in enumerate(found)]
        for mistake, numbers in wrong.items():
            require(mine != numbers, f"{where}: {mistake}")
        require(mine != right[1:] + right[:1], f"{where}: rank r has what rank r + 1 should have")
        for rank in range(ranks):
            counts = len(mine[rank]), len(right[rank])
            told = f"it should begin at {right[rank][0]}" if right[rank] else "it owns nothing"
            said = f"{where}: rank {rank} has {counts[0]} numbers, and it should have {counts[1]}; (tensor, position): "
            began = f"its first is {mine[rank][0]}" if mine[rank] else "it has none"
            require(mine[rank] == right[rank], f"{said}{began}, {told}")


def expanded(owned: list, sizes: list[int], where: str) -> list[tuple[int, int]]:
    for piece in owned:
        require(len(piece) == 3, f"{where}: a piece is (tensor, start, stop), not {piece}")
        tensor, start, stop = piece
        require(tensor in range(len(sizes)), f"{where}: there is no tensor {tensor}")
        require(start != stop, f"{where}: the piece {piece} is empty: leave it out")
        own = "positions count from the tensor's own beginning, and padding is no piece"
        require(0 <= start, f"{where}: the piece {piece} begins before its tensor: {own}")
        require(
            stop <= sizes[tensor], f"{where}: the piece {piece} goes past the end of a tensor of {sizes[tensor]}: {own}"
        )
        require(start < stop, f"{where}: the piece {piece} stops before it starts")
    return [(tensor, position) for tensor, start, stop in owned for position in range(start, stop)]


_PIECES = """
share = {share}
owned, offset = [], 0
for tensor, size in enumerate(sizes):
    start, stop = max(0, rank * share - offset), min(size, (rank + 1) * share - offset)
    if {kept}:
        owned.append(({piece}))
    offset += size
return owned
"""
_CUT = {"share": "math.ceil(sum(sizes) / ranks)", "kept": "start < stop", "piece": "tensor, start, stop"}
whose_numbers.refuses("rounded down", "have no owner", _PIECES.format(**_CUT | {"share": "sum(sizes) // ranks"}))
whose_numbers.refuses(
    "empty pieces",
    "leave it out",
    _PIECES.format(**_CUT | {"kept": "True", "piece": "tensor, min(start, size), max(min(start, size), stop)"}),
)
whose_numbers.refuses(
    "positions in the long row",
    "the tensor's own beginning",
    _PIECES.format(**_CUT | {"piece": "tensor, start + offset, stop + offset"}),
)
whose_numbers.refuses(
    "whole tensors in turn",
    "it should",
    "return [(tensor, 0, size) for tensor, size in enumerate(sizes) if tensor % ranks == rank]",
)
whose_numbers.refuses(
    "ranks from 1 on",
    "what rank r + 1 should have",
    "rank = (rank + 1) % ranks\n" + _PIECES.format(**_CUT).strip(),
)
whose_numbers.refuses(
    "hard-coded for the shown tensors",
    "tensors of",
    "return [[(0, 0, 4)], [(0, 4, 6), (1, 0, 2)], [(1, 2, 3), (2, 0, 3)], [(2, 3, 4)]][rank % 4]",
)


# 04.2 ---------------------------------------------------------------------------------------------------------------


def serial(weights: torch.Tensor, gradients: list[torch.Tensor], max_norm: float, change=None) -> torch.Tensor:
    """Train in one process; gradients: (ranks, n), one a step. `change` makes a mistake of clipping the mean."""
    own = weights.clone().requires_grad_()
    optimizer = torch.optim.AdamW([own], lr=0.1)
    for of_ranks in gradients:
        own.grad = of_ranks.mean(0)
        if change:
            own.grad = change(own.grad, of_ranks)
        else:
            torch.nn.utils.clip_grad_norm_([own], max_norm)
        optimizer.step()
    return own.detach()


def mistakes(n_ranks: int, max_norm: float) -> dict:
    """message -> how the mean gradient would be changed; of_ranks has the gradient of each rank."""

    def clip(gradient, norm):
        return gradient * (max_norm / norm).clamp(max=1)

    def shares(gradient):
        return gradient.reshape(n_ranks, -1)

    def by_share(mean, _):
        return clip(shares(mean), shares(mean).norm(dim=1, keepdim=True)).reshape(-1)

    def by_rank(mean, of_ranks):
        return clip(shares(mean), of_ranks.norm(dim=1, keepdim=True)).reshape(-1)

    return {
        "the gradients are never clipped": lambda mean, _: mean,
        "each rank scales by the norm of its own share: all must scale by the same number": by_share,
        "each rank scales by the norm of its own gradient, before the ranks are averaged": by_rank,
        "the norms of the shares are added up: their squares add up, norms do not": lambda mean, _: clip(
            mean, shares(mean).norm(dim=1).sum()
        ),
        "the squared norm stands where the norm should: take the root": lambda mean, _: clip(mean, mean.norm() ** 2),
        "a small gradient is scaled up to max_norm: it should stay as it is": lambda mean, _: (
            mean * max_norm / mean.norm()
        ),
        "what arrives is the sum of the ranks, not their mean: divide before you clip": lambda mean, _: clip(
            mean * n_ranks, mean.norm() * n_ranks
        ),
        "the norm is that of the sum of the ranks: divide first, then measure": lambda mean, _: clip(
            mean, mean.norm() * n_ranks
        ),
    }


@exercise(
    "04.2",
    "Clip what nobody has whole",
    "train",
    minutes=12,
    ranks=True,
    hints=[
        "A norm is a root of a sum of squares. Each rank can sum the squares of its own share: who adds up the rest?",
        "What arrives is a sum: make it the mean first. Then find the norm, with one all_reduce. Scale by at most 1.",
        "After `optimizer.step()` a rank has only its own share anew: `dist.all_gather` into the chunks of `weights`.",
    ],
)
def clip_whole(train):
    n_ranks = train.size
    n, max_norm = n_ranks * random.randint(3, 7), random.uniform(1.2, 3)
    weights, gradients = torch.randn(n).double(), []
    for times in (random.uniform(3, 9), 0.1, random.uniform(12, 20), 0.05):  # of max_norm: clip, leave, clip, leave
        of_ranks = torch.randn(n_ranks, n).double() * torch.linspace(1, 3, n_ranks)[:, None].double()
        gradients.append(of_ranks * times * max_norm / of_ranks.mean(0).norm())
    right = serial(weights, gradients, max_norm)
    causes = {
        text: [serial(weights, gradients, max_norm, change)] * n_ranks
        for text, change in mistakes(n_ranks, max_norm).items()
    }
    stale = [weights.clone() for _ in range(n_ranks)]
    for rank, held in enumerate(stale):
        held.chunk(n_ranks)[rank].copy_(right.chunk(n_ranks)[rank])
    causes["each rank has new weights in its own share only, and stale ones elsewhere: gather them"] = stale
    causes["the weights are the old ones: is `weights` written after the update?"] = [weights] * n_ranks
    mine = [list(of_rank) for of_rank in torch.stack(gradients).unbind(1)]
    found = train.each([weights] * n_ranks, mine, [max_norm] * n_ranks)
    same_on_ranks(found, [right] * n_ranks, "the weights", causes=causes, rtol=1e-6)
    sent = train.sent[0].get("all_reduce", (0, 0))[1]
    require(
        sent <= 8 * len(gradients),
        f"the weights are right, but a rank hands {sent} bytes to all_reduce in {len(gradients)} steps: "
        "one number of 8 bytes a step is enough",
    )
    gathered = train.sent[0].get("all_gather", (0, 0))[1] / len(gradients)
    require(
        gathered <= weights.nbytes + 8 * n_ranks,
        f"the weights are right, but {gathered:.0f} bytes are gathered in a step, and the weights have "
        f"{weights.nbytes}: norms need no gradients of others",
    )


_CLIP = """
own.grad /= {mean}
squared = {squared}
{add_up}
own.grad *= {scale}
optimizer.step()
{gather}
"""
_RIGHT = {
    "mean": "world_size",
    "squared": "own.grad.square().sum()",
    "add_up": "dist.all_reduce(squared)",
    "scale": "min(1.0, max_norm / squared.sqrt().item())",
    "gather": "dist.all_gather(list(weights.chunk(world_size)), own.detach())",
}
clip_whole.refuses("never clipped", "never clipped", _CLIP.format(**_RIGHT | {"scale": "1"}))
clip_whole.refuses("by its own share", "the norm of its own share", _CLIP.format(**_RIGHT | {"add_up": ""}))
clip_whole.refuses(
    "by its own gradient",
    "its own gradient, before",
    _CLIP.format(**_RIGHT | {"squared": "gradient.square().sum()", "add_up": ""}),
)
clip_whole.refuses(
    "norms added up",
    "their squares add up",
    _CLIP.format(**_RIGHT | {"squared": "own.grad.norm()", "scale": "min(1.0, max_norm / squared.item())"}),
)
clip_whole.refuses(
    "root forgotten", "take the root", _CLIP.format(**_RIGHT | {"scale": "min(1.0, max_norm / squared.item())"})
)
clip_whole.refuses(
    "small ones scaled up", "scaled up to max_norm", _CLIP.format(**_RIGHT | {"scale": "max_norm / squared.sqrt()"})
)
clip_whole.refuses("sum for mean", "divide before you clip", _CLIP.format(**_RIGHT | {"mean": "1"}))
clip_whole.refuses(
    "not gathered",
    "stale ones elsewhere",
    _CLIP.format(**_RIGHT | {"gather": "weights.chunk(world_size)[rank].copy_(own.detach())"}),
)
clip_whole.refuses(
    "the whole gradient reduced for its norm",
    "one number of 8 bytes",
    _CLIP.format(
        **_RIGHT
        | {"squared": "gradient / world_size", "add_up": "dist.all_reduce(squared)\nsquared = squared.square().sum()"}
    ),
)
clip_whole.refuses(
    "hard-coded max_norm of 1",
    "the weights",
    _CLIP.format(**_RIGHT | {"scale": "min(1.0, 1.0 / squared.sqrt().item())"}),
)


# 04.3 ---------------------------------------------------------------------------------------------------------------


def smallest(parameters: float, stage: int, usable_bytes: float) -> int | None:
    """By counting up, with the bytes of the ZeRO paper's figure 1."""
    for dp in range(1, 2000):
        if sum(cost.zero_state_bytes(parameters, stage, dp).values()) <= usable_bytes:
            return dp
    return None


@exercise(
    "04.3",
    "How many devices?",
    "devices",
    minutes=8,
    core=False,
    hints=[
        "Each stage splits the 16 bytes in two: those that every device holds whole, and those that are divided.",
        "What the whole part leaves of usable_bytes is room for divided bytes: how many such rooms do you need?",
        "No room, no number of devices. And a device cannot be cut: round up.",
    ],
)
def how_many_devices(devices):
    for low, high in ((17, 25), (4.5, 15), (2.3, 3.8), (0.2, 1.8)):
        parameters = random.choice([1, 1.5, 3, 7, 13, 22, 70]) * 1e9
        usable = random.randint(int(low * parameters), int(high * parameters))
        found = devices(parameters, usable)
        where = f"{parameters / 1e9:g} billion parameters, {usable / 1e9:.1f} GB a device"
        require(isinstance(found, (list, tuple)) and len(found) == 4, f"return a list of four, not {str(found)[:60]}")
        for stage, mine in enumerate(found):
            check_stage(stage, mine, parameters, usable, where)


def check_stage(stage: int, mine: object, parameters: float, usable: int, where: str) -> None:
    right, told = smallest(parameters, stage, usable), f"{where}: at stage {stage} "
    if right is None:
        whole = sum(cost.zero_state_bytes(parameters, stage, 10**9).values()) / 1e9
        require(mine is None, f"{told}you say {mine}, but every device holds {whole:.1f} GB whole: no number is enough")
        return
    require(mine is not None, f"{told}you say None, but {right} would do: stages divide more and more")
    require(mine == int(mine), f"{told}you say {mine:.4g}: a device cannot be cut")
    require(mine >= 1, f"{told}you say {mine}: at least one device is needed")
    holds = sum(cost.zero_state_bytes(parameters, stage, int(mine)).values()) / 1e9
    require(mine >= right, f"{told}you say {mine}, but then each would hold {holds:.1f} GB")
    require(mine == right, f"{told}you say {mine}, but {right} would do")


_COUNT = """
found = []
for divided in {divided}:
    room = {usable} - (16 - divided) * parameters
    if room < 0 or (divided and not room):
        found.append(None)
    else:
        found.append(max(1, {rounded}))
return found
"""
_UP = {
    "divided": "(0, 12, 14, 16)",
    "usable": "usable_bytes",
    "rounded": "math.ceil(divided * parameters / room) if divided else 1",
}
how_many_devices.refuses(
    "everything divided at each stage", "no number is enough", "return [math.ceil(16 * parameters / usable_bytes)] * 4"
)
how_many_devices.refuses(
    "rounded down",
    "then each would hold",
    _COUNT.format(**_UP | {"rounded": "int(divided * parameters / room) if divided else 1"}),
)
how_many_devices.refuses(
    "not rounded",
    "cannot be cut",
    _COUNT.format(**_UP | {"rounded": "divided * parameters / room if divided else 1"}),
)
how_many_devices.refuses(
    "parameters divided before gradients are", "stage 2", _COUNT.format(**_UP | {"divided": "(0, 12, 12, 16)"})
)
how_many_devices.refuses(
    "gradients of 4 bytes",
    "would do",
    _COUNT.format(**_UP | {"divided": "(0, 12, 16, 18)"}).replace("(16 -", "(18 -"),
)
how_many_devices.refuses("hard-coded for the shown model", "stage", "return [None, None, None, 11]")
