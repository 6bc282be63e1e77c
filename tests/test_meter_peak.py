"""What the meter says of a step."""

from __future__ import annotations

from aiscale.measure.distributed import connect
from aiscale.measure.distributed.counter import Group
from aiscale.measure.meter import Meter


def test_a_step_reports_the_bytes_of_all_groups_that_call_the_same_collective():
    world = connect("cpu")
    meter = Meter(world, flops_per_token=1.0, precision="fp32")
    with meter.step():
        for name, nbytes in (("tp", 64), ("dp", 1000)):
            world.traffic.add("all_reduce", Group(name, (0, 1)), nbytes)
    world.close()
    told = meter.record(tokens=1)
    assert told["payload_bytes"] == {"all_reduce": 1064} and told["wire_bytes"] == 1064
