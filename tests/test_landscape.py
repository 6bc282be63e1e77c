"""Each idea of the landscape equals serial training, and with a planted fault it does not."""

import json
import os
import random

import pytest

from aiscale.landscape import elastic
from aiscale.landscape.plans import first_plan, next_plan, template
from ranks import processes_with, run_ranks

#: fp64: sums in another order
EQUAL = 1e-12
#: kills at random places for each idea; AISCALE_KILLS=20 for the benchmark
KILLS = int(os.environ.get("AISCALE_KILLS", "5"))
#: what each idea may repeat, in steps: a rank may die after the commit and before its part of a checkpoint of two
REPEATED = {"bamboo": 0, "oobleck": 1, "varuna": 3, "restart": 3}

ON_RANKS = """
import json
import torch.nn.functional as F
from aiscale.config import ModelConfig
from aiscale.landscape import SquareGrid, message_driven, ring_attention, unzigzag, zigzag
from aiscale.model import GPT

def gap(pairs):
    return max((a - b).abs().max().item() for a, b in pairs)

def drawn(*size):
    return torch.randn(*size, dtype=torch.float64, requires_grad=True)

torch.manual_seed(0)
found = {}
Q, K, V = (drawn(2, 2, 24, 4) for _ in range(3))
Y = F.scaled_dot_product_attention(Q, K, V, is_causal=True)
dY = torch.randn_like(Y)
Y.backward(dY)
for fault in ("", "merge", "home"):
    q, k, v = (zigzag(x.detach(), world).requires_grad_() for x in (Q, K, V))
    y = ring_attention(q, k, v, world, fault=fault)
    y.backward(zigzag(dY, world))
    pairs = ((y, Y), (q.grad, Q.grad), (k.grad, K.grad), (v.grad, V.grad))
    found["ring " + fault] = gap((unzigzag(mine, world), whole) for mine, whole in pairs)
if world.size == 4:
    A, B = drawn(4, 6), drawn(6, 8)
    C = A @ B
    dC = torch.randn_like(C)
    C.backward(dC)
    grid = SquareGrid(world)
    for fault in ("", "turn", "reduction"):
        a, b = (grid.cut(x.detach()).requires_grad_() for x in (A, B))
        before = world.traffic.snapshot()
        c = grid.matmul(a, b, fault=fault)
        c.backward(grid.cut(dC))
        sent = {op: count.payload_bytes for (op, _), count in world.traffic.since(before).items()}
        found["bytes " + fault] = sent == grid.payload_bytes(a, b)
        found["grid " + fault] = gap((grid.whole(x), y) for x, y in ((c, C), (a.grad, A.grad), (b.grad, B.grad)))
model = GPT(ModelConfig(n_layer=5, n_head=2, d_model=16, vocab_size=16, max_seq_len=8, tied=False)).double()
batches = [(torch.randint(0, 16, (2, 8)), torch.randint(0, 16, (2, 8))) for _ in range(6)]
loss = sum(model(*batch) for batch in batches) / len(batches)
loss.backward()
right = {name: p.grad.clone() for name, p in model.named_parameters()}
for order, fault in (("arrival", ""), ("1f1b", ""), ("arrival", "skip")):
    out = message_driven(world, model, batches, order=order, fault=fault)
    gaps = world.gather(gap((grad, right[name]) for name, grad in out.gradients.items() if grad is not None))
    found[f"{order} {fault}"] = max(*gaps, abs(out.loss - loss.item()))
    assert sorted(e.kind[0] + e.name for e in out.events) == [f"{kind}{m}" for kind in "bf" for m in range(6)]
    if order == "1f1b":
        found["passes"] = world.gather("".join(e.kind[0] for e in out.events))
if world.is_main:
    say(json.dumps(found))
"""


def on_ranks(n, folder):
    done = run_ranks(ON_RANKS, n, folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return on_ranks(4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("idea", ["ring ", "grid ", "arrival ", "1f1b "])
def test_an_idea_on_four_ranks_equals_serial_forward_and_backward(idea, four):
    assert four[idea] < EQUAL


@pytest.mark.parametrize("idea", ["ring merge", "ring home", "grid turn", "grid reduction", "arrival skip"])
def test_a_planted_fault_makes_an_idea_differ_from_serial(idea, four):
    assert four[idea] > 1e-3


def test_the_bytes_of_a_two_dimensional_product_are_those_of_the_formula(four):
    assert four["bytes "] and not four["bytes turn"] and not four["bytes reduction"]


def test_a_pipeline_in_fixed_order_runs_1f1b(four):
    assert four["passes"] == ["ffffbfbfbbbb", "fffbfbfbfbbb", "ffbfbfbfbfbb", "fbfbfbfbfbfb"]


@pytest.mark.extended
def test_three_ranks_equal_serial(tmp_path):
    found = on_ranks(3, tmp_path)
    assert max(found[idea] for idea in ("ring ", "arrival ", "1f1b ")) < EQUAL


def test_plans_cover_all_layers_and_micro_batches():
    for idea in ("bamboo", "oobleck", "varuna"):
        sizes = {"layers": 6, "micro_batches": 6}
        plan = first_plan(idea, ranks=4, **sizes)
        for dead in range(4):
            for each in (plan, next_plan(idea, plan, [rank for rank in range(4) if rank != dead], **sizes)):
                assert sorted(m for share in each.shares for m in share) == list(range(6))
                assert all([n for stage in stages for n in stage.layers] == list(range(6)) for stages in each.pipelines)
    assert template(7, 3) == [(0, 1, 2), (3, 4), (5, 6)]
    two_and_one = next_plan("oobleck", first_plan("oobleck", ranks=4, **sizes), [0, 1, 3], **sizes)
    assert two_and_one.shares == ((0, 1, 2, 3), (4, 5)), "in proportion to a pipeline's ranks"


@pytest.fixture
def beside_an_undisturbed_job(monkeypatch, tmp_path):
    """run(idea, kills): each job with a kill, and how much it differs from one without. No process may be left."""
    monkeypatch.setenv("AISCALE_TEST_MARK", str(tmp_path))

    def run(idea, kills, fault=""):
        calm, *hit = elastic.run(
            [elastic.Scenario(idea), *(elastic.Scenario(idea, kill=kill, fault=fault) for kill in kills)]
        )
        assert calm.copies_differ == 0 and calm.steps_repeated == 0
        return [(each, elastic.difference(each, calm)) for each in hit]

    yield run
    assert not processes_with(str(tmp_path))


def test_bamboos_neighbour_finishes_the_step_of_a_killed_rank_bit_by_bit(beside_an_undisturbed_job):
    ((hit, difference),) = beside_an_undisturbed_job("bamboo", [(2, 3, 5)])
    assert difference == 0 and hit.steps_repeated == 0 and hit.copies_differ == 0
    (killed,) = (event for event in hit.events if event["event"] == "killed")
    seen_s, done_s = (
        {e["rank"]: e["at_s"] for e in hit.events if e["event"] == kind and e["step"] == 3}
        for kind in ("detected", "done")
    )
    assert (killed["rank"], killed["step"]) == (2, 3) and seen_s.keys() == done_s.keys() == {0, 1, 3}
    assert hit.detect_s == max(seen_s.values()) - killed["at_s"] > 0
    assert hit.recover_s == max(done_s.values()) - killed["at_s"] > hit.detect_s


@pytest.mark.extended
@pytest.mark.timeout(180 * max(KILLS, 5))
@pytest.mark.parametrize("idea", ["bamboo", "oobleck", "varuna", "restart"])
def test_jobs_with_a_rank_killed_at_random_end_equal(idea, beside_an_undisturbed_job):
    last = elastic.Scenario(idea, kill=(2, 5, 0)).places() - 1
    kills, draw = [(2, 5, last)] if idea != "restart" else [], random.Random(idea)  # after the last commit
    for _ in range(KILLS if idea != "restart" else 1):
        rank, step = draw.randrange(4), draw.randrange(6)
        kills.append((rank, step, draw.randrange(elastic.Scenario(idea, kill=(rank, step, 0)).places())))
    for hit, difference in beside_an_undisturbed_job(idea, kills):
        limit = 0 if idea in ("bamboo", "restart") else EQUAL
        assert difference <= limit and hit.copies_differ == 0, hit.scenario
        assert hit.steps_repeated <= REPEATED[idea], hit.scenario


@pytest.mark.extended
@pytest.mark.parametrize(
    ("idea", "fault"),
    [("bamboo", "reduction"), ("oobleck", "reduction"), ("oobleck", "moments"), ("varuna", "moments")],
)
def test_a_planted_fault_makes_a_survivors_job_differ(idea, fault, beside_an_undisturbed_job):
    ((_, difference),) = beside_an_undisturbed_job(idea, [(1, 3, 4)], fault)
    assert difference > 1e-4
