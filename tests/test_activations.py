"""Activations under tensor and sequence parallelism: what autograd keeps, against formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ranks import forked

SP, BF16 = "--sequence-parallel", "--bf16"
#: options, layers
CASES = [
    ("--tp 2", 4),
    (f"--tp 2 {SP}", 4),
    ("--tp 1", 4),
    (f"--tp 2 {BF16}", 4),
    (f"--tp 2 {BF16}", 2),
    (f"--tp 2 {SP} {BF16}", 4),
    (f"--tp 2 {SP} {BF16}", 2),
]


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, int], dict]:
    arguments = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
        "--nproc-per-node=2",
    ]
    arguments += ["-m", "kept_by_megatron", json.dumps(CASES)]
    done = forked(arguments, timeout=600, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_what_megatron_keeps_is_predicted(case, found):
    assert found[case]["planned"] == pytest.approx(found[case]["kept"], rel=0.02)


@pytest.mark.parametrize("options", [f"--tp 2 {BF16}", f"--tp 2 {SP} {BF16}"])
def test_a_layer_keeps_what_korthikanti_predict_within_ten_percent(options, found):
    """The difference of two depths leaves only the layers.
    The paper counts 2 more bytes for dropout masks, and 5 for scores where we have 6."""
    four, two = found[options, 4], found[options, 2]
    assert four["kept"][0] - two["kept"][0] == pytest.approx(
        four["korthikanti"] - two["korthikanti"], rel=0.1
    )
