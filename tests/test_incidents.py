"""The recorded incidents: one rank of 64 is sick in each, and what the lesson looks at tells."""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections import Counter
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
FILES = sorted((ROOT / "workshop" / "incidents").glob("*.jsonl.gz"))


def read(path: Path) -> list[dict]:
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def planted():
    import record_incidents

    return [fault["rank"] for _, fault in record_incidents.INCIDENTS]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_healthy_ranks_warn_as_well_and_every_rank_has_left_its_part(path):
    ranks = read(path)
    assert [each["rank"] for each in ranks] == list(range(64))
    assert all(each["collectives"] and each["steps"] for each in ranks)
    warned = [each["rank"] for each in ranks if "WARN" in "".join(each["log"])]
    assert len(warned) > 10
    assert path.stat().st_size < 30_000


def test_the_rank_that_dropped_batches_has_begun_fewer_collectives(planted):
    last = [each["collectives"][-1][0] for each in read(FILES[0])]
    assert Counter(last) == {max(last): 63, last[planted[0]]: 1}
    assert last[planted[0]] < max(last)


def test_the_slow_rank_computes_longest_and_all_reduces_shortest(planted):
    ranks = read(FILES[1])

    def typical(key: str) -> list[float]:
        return [median(step[key] for step in each["steps"][4:]) for each in ranks]

    computing, waiting = typical("compute_ms"), typical("all_reduce_ms")
    assert computing[planted[1]] == max(computing) > 1.5 * sorted(computing)[-2]
    assert waiting[planted[1]] == min(waiting)


def test_one_gradient_is_odd_before_every_loss_is_wrong(planted):
    found = []
    for each in read(FILES[2]):
        text = "\n".join(each["log"])
        found.append({int(s): (float(a), float(b)) for s, a, b in LINE.findall(text)})
    norms = {step: [mine[step][1] for mine in found] for step in found[0]}
    odd = next(step for step in norms if max(norms[step]) > 10 * median(norms[step]))
    assert norms[odd][planted[2]] == max(norms[odd])
    losses = {step: median(mine[step][0] for mine in found) for step in found[0]}
    assert losses[odd] < 1.5 * losses[0] and not losses[max(losses)] < 100 * losses[0]


LINE = re.compile(r"step (\d+) loss (\S+) own gradient (\S+)")
