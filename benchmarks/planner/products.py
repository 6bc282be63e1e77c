"""How well `wave_share` and `kernel_s` say the rate of measured matrix products.

    # MIT; its profiles of vLLM's layers on A100 and H100
    git clone https://github.com/microsoft/vidur
    # Apache 2.0; XLA's products of 256 to 4,096 on B200, H100 and MI300X
    git clone https://github.com/ROCm/xla && git -C xla checkout d02afb4
    python benchmarks/planner/products.py vidur/data/profiling/compute \\
        xla/xla/service/gpu/model/matmul_interpolator_data.h

For each device and several inner dimensions at which a product reaches half its rate: the median
rate, as a share of the data sheet's peak, and the median distance of the logarithms from it.
`inner_half` grows with the peak of one unit: the line of a device is marked that is nearest to it.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
from collections import defaultdict
from pathlib import Path
from statistics import median

from aiscale.plan.constants import CONSTANTS
from aiscale.plan.hardware import Platform, platform
from aiscale.plan.products import unit_share, wave_share

VIDUR = {"a100": "a100-sxm4-80gb", "h100": "h100-sxm5-80gb"}
XLA = {"sm_100_B200": "b200-sxm", "sm_90": "h100-sxm5-80gb", "gfx942": "mi300x"}
HALVES = (0, 32, 64, 96, 128, 192, 256, 384)
LEAST_ROWS = 1024
LEAST_FLOPS = 2**31  #: of a product in XLA's table: smaller ones are no part of training
Shape = tuple[int, int, int, int]  #: rows, columns, inner, products in one kernel


def of_vidur(file: Path) -> list[tuple[Shape, float]]:
    """(shape, seconds) of each product of one model."""
    found = []
    for row in csv.DictReader(file.open()):
        keys = (
            "num_tokens",
            "num_tensor_parallel_workers",
            "n_embd",
            "n_expanded_embd",
            "n_head",
            "n_kv_head",
        )
        tokens, tp, hidden, width, heads, kv_heads = (int(row[key]) for key in keys)
        qkv = (heads // tp + 2 * max(1, kv_heads // tp)) * (hidden // heads)
        up = width * (2 if row["use_gated_mlp"] == "True" else 1)
        shapes = {"attn_pre_proj": (qkv, hidden), "attn_post_proj": (hidden, hidden // tp)}
        shapes |= {"mlp_up_proj": (up // tp, hidden), "mlp_down_proj": (hidden, width // tp)}
        for name, (columns, inner) in shapes.items():
            if (ms := row[f"time_stats.{name}.median"]) and tokens >= LEAST_ROWS:
                found.append(((tokens, columns, inner, 1), float(ms) / 1000))
    return found


def of_xla(file: Path) -> dict[str, list[tuple[Shape, float]]]:
    """{device: (shape, seconds) of its products in bf16}."""
    found, device, shape = defaultdict(list), "", (0, 0, 0, 0)
    tokens = re.compile(
        r'key: "(sm_\w+|gfx\w+)"|b: (\d+)\s+m: (\d+)\s+n: (\d+)\s+k: (\d+)'
        r'|key: "bf16xbf16->bf16"\s*value: (\d+)'
    )
    for match in tokens.finditer(file.read_text()):
        if match[1]:
            device = match[1]
        elif match[2]:
            many, rows, columns, inner = map(int, match.group(2, 3, 4, 5))
            shape = rows, columns, inner, many
        elif 2 * math.prod(shape) >= LEAST_FLOPS:
            found[device].append((shape, 2 * math.prod(shape) / int(match[6])))
    return found


def report(title: str, on: Platform, measured: list[tuple[Shape, float]]) -> None:
    """The rate and the error for each candidate of `inner_half`."""
    own = CONSTANTS.inner_half * unit_share(on)
    nearest = min(HALVES, key=lambda half: abs(half - own))
    print(f"{title}: {len(measured):,} products, {1e6 * CONSTANTS.kernel_s:g} us a kernel")
    for half in HALVES:
        best = [
            2 * math.prod(shape) / on.peak("bf16") / wave_share(*shape, on.units, half)
            for shape, _ in measured
        ]
        seconds = [taken for _, taken in measured]
        shares = (
            b / max(1e-7, taken - CONSTANTS.kernel_s)
            for b, taken in zip(best, seconds, strict=True)
        )
        rate = median(shares)
        error = median(
            abs(math.log((b / rate + CONSTANTS.kernel_s) / taken))
            for b, taken in zip(best, seconds, strict=True)
        )
        mark = "  <- inner_half of this device" if half == nearest else ""
        print(f"  {half:3}: rate {rate:.3f} of the peak, error {100 * error:.1f} %{mark}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("vidur", type=Path, help="folder of Vidur's profiles")
    parser.add_argument("xla", type=Path, help="XLA's matmul_interpolator_data.h")
    args = parser.parse_args()
    for device, name in VIDUR.items():
        taken = defaultdict(list)
        for file in sorted((args.vidur / device).rglob("mlp.csv")):
            for shape, seconds in of_vidur(file):
                taken[shape].append(seconds)
        rows = [(shape, median(times)) for shape, times in taken.items()]
        report(f"{device}, Vidur", platform(name), rows)
    for device, rows in of_xla(args.xla).items():
        report(f"{device}, XLA", platform(XLA[device]), rows)


if __name__ == "__main__":
    main()
