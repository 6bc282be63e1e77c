"""Grader of the exercise on number formats: the list of fp4's numbers, and Python's own exponents."""

import math
import random

import torch

from aiscale.lesson.grading import exercise, require, same

#: all that four bits can say: a sign, two bits of exponent, one of fraction
FP4 = [sign * size for size in (0, 0.5, 1, 1.5, 2, 3, 4, 6) for sign in (1, -1)]


def by_list(row: list[float], size: int, scale_of) -> list[float]:
    """Each number of a row as the nearest entry of FP4 times the scale of its block."""
    found = []
    for start in range(0, len(row), size):
        block = row[start : start + size]
        scale = scale_of(max(map(abs, block)))
        found += [scale * min(FP4, key=lambda entry: abs(entry - x / scale)) for x in block]
    return found


def power(most: float) -> float:
    """2^(e - 2), e the exponent of `most`: frexp's fraction lies between 1/2 and 1, so its exponent is one higher."""
    return math.ldexp(1.0, math.frexp(most)[1] - 1 - 2)


# 14.1 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "14.1",
    "A scale for each block",
    "block_rounded",
    minutes=10,
    hints=[
        "`x.view(-1, size)` has a row for each block; `.abs().amax(1, keepdim=True)` is the largest size in each.",
        "The exponent e of y is `torch.log2(y).floor()`, and the scale `torch.exp2(e - 2)`.",
        "A block of zeros has no exponent: `.clamp(min=1e-30)` before the logarithm keeps its scale above 0.",
    ],
)
def a_scale_for_each_block(block_rounded):
    for size in (32, 16, 8):
        rows, blocks = random.randint(2, 4), random.randint(2, 3)
        spread = torch.exp2(torch.randint(-12, 6, (rows, blocks, 1)).float())  # each block of another size
        x = (torch.randn(rows, blocks, size) * spread).flatten(1)
        x[0, :size] = 0.0
        expected = {
            name: torch.tensor([by_list(row, width, scale_of) for row in x.tolist()])
            for name, width, scale_of in (
                ("right", size, lambda most: power(most) if most else 1.0),
                ("6", size, lambda most: most / 6 or 1.0),
                ("whole", x.shape[1], power),
                ("e", size, lambda most: 4 * power(most) if most else 1.0),
                ("none", size, lambda most: 1.0),
            )
        }
        found = block_rounded(x.clone(), size)
        require(torch.is_tensor(found) and found.shape == x.shape, f"return a tensor of the shape {tuple(x.shape)}")
        require(bool(found.isfinite().all()), "some results are not finite: one block has zeros only, and no exponent")
        causes = {
            "the scale is the largest size / 6, not a power of two: 8 bits cannot store it": expected["6"],
            "all blocks of a row have one scale": expected["whole"],
            "the scale is 2^e, so that the largest numbers become 1 to 2: fp4 goes up to 6": expected["e"],
            "there is no scale: fp4's smallest number above 0 is 0.5": expected["none"],
            "nothing is rounded": x,
        }
        same(found, expected["right"], "the rounded tensor", causes=causes, rtol=1e-6)


_BLOCKS = "blocks = x.view(-1, size)\nmost = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30)\n"
a_scale_for_each_block.refuses(
    "the largest over 6",
    "not a power of two",
    _BLOCKS + "return (nearest_fp4(blocks / (most / 6)) * (most / 6)).view(x.shape)",
)
a_scale_for_each_block.refuses(
    "2^e",
    "fp4 goes up to 6",
    _BLOCKS + "scale = torch.exp2(most.log2().floor())\nreturn (nearest_fp4(blocks / scale) * scale).view(x.shape)",
)
a_scale_for_each_block.refuses(
    "one scale for a row",
    "all blocks of a row",
    "scale = torch.exp2(x.abs().amax(1, keepdim=True).log2().floor() - 2)\nreturn nearest_fp4(x / scale) * scale",
)
a_scale_for_each_block.refuses("no scale", "there is no scale", "return nearest_fp4(x)")
a_scale_for_each_block.refuses(
    "hard-coded for the shown block", "return a tensor of the shape", "return torch.tensor([0.125, -0.75, 0.0, 0.0])"
)
