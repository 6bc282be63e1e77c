"""How well `wave_share` says the rate of measured matrix products, for several `inner_half`.

    # MIT; its profiles of vLLM's layers on A100 and H100
    git clone https://github.com/microsoft/vidur
    python benchmarks/planner/products.py vidur/data/profiling/compute

Products of 1,024 to 4,096 rows of six models, cut over 1 to 8 ranks. Rate: the median measured rate
over `wave_share`, a share of the data sheet's peak. Error: the median distance of the logarithms
from it. The constant stands where the errors of both devices are small.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections import defaultdict
from pathlib import Path
from statistics import median

from aiscale.plan.hardware import platform
from aiscale.plan.products import wave_share

DEVICES = {"a100": "a100-sxm4-80gb", "h100": "h100-sxm5-80gb"}
HALVES = (0, 64, 96, 128, 192, 256, 384)
LEAST_ROWS = 1024


def products(file: Path) -> list[tuple[int, int, int, float]]:
    """(rows, columns, inner, seconds) of each product of one model."""
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
                found.append((tokens, columns, inner, float(ms) / 1000))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for device, name in DEVICES.items():
        on, measured = platform(name), defaultdict(list)
        for file in sorted((folder / device).rglob("mlp.csv")):
            for *shape, seconds in products(file):
                measured[tuple(shape)].append(seconds)
        print(f"{device}: {len(measured):,} products")
        for half in HALVES:
            shares = (
                2
                * math.prod(shape)
                / median(times)
                / on.peak("bf16")
                / wave_share(*shape, 1, on.units, half)
                for shape, times in measured.items()
            )
            logs = [math.log(share) for share in shares]
            rate = median(logs)
            error = median(abs(log - rate) for log in logs)
            print(
                f"  inner_half {half:3}: rate {math.exp(rate):.3f} of the peak, "
                f"error {100 * error:.1f} %"
            )


if __name__ == "__main__":
    main()
