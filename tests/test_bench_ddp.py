"""The DDP benchmark runs and reports its three times."""

import json

import pytest

from ranks import aiscale


@pytest.mark.extended
def test_the_benchmark_reports_its_three_times_and_their_ratio():
    done = aiscale("bench", "ddp", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    ddp, no_sync, all_reduce = result["median_s"].values()
    assert min(ddp, no_sync, all_reduce) > 0
    assert result["ratio"] == ddp / (no_sync + all_reduce)
    assert result["ranks"] == 2 and result["machine"]["torch"]
