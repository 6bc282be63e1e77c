"""Bytes that gloo really sends, by the network interface, against cost.wire_bytes: 2 to 4 ranks."""

import json

import pytest

from aiscale.plan import cost
from net import network_namespace, run_in_namespace
from ranks import COLLECTIVES

_, WHY_NOT = network_namespace()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

EACH = """
import json
r = world.rank
def sent_by(work):
    before = settled()
    work()
    return settled() - before
for op, work in collectives(world, 12 * 2**20).items():  # divisible by 2, 3 and 4
    work()  # the first call connects
    counted = world.traffic.groups()
    sends = [sent_by(work)]
    counts = {name: c.payload_bytes for (name, _), c in world.traffic.groups_since(counted).items()}
    # A kernel that gets no core in time sends a segment twice; the payload can never be less.
    sends += [sent_by(work) for _ in range(4)]
    if r == 0:
        os.write(1, (json.dumps([op, min(sends), counts[op]]) + "\\n").encode())
"""


@pytest.mark.extended
@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_interface_counts_the_predicted_bytes(n, tmp_path):
    done = run_in_namespace(COLLECTIVES + EACH, n, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert len(lines) == 9
    for op, sent, payload in lines:
        assert payload == 12 * 2**20, op
        ranks = 1 if op == "send" else n  # all ranks send on the same loopback
        predicted = ranks * cost.wire_bytes(op, payload, n, "gloo")
        # Headers and acknowledgements: at most 2 % with segments of 64 kB, plus some kB for
        # barriers.
        assert predicted * 0.999 < sent < predicted * 1.02 + 50_000, (
            op,
            sent / payload,
            predicted / payload,
        )
