"""Pipelines: every schedule trains like one process, sends the predicted bytes, and idles as long as predicted."""

import json
from types import SimpleNamespace

import matplotlib
import pytest
import torch

matplotlib.use("Agg")

from aiscale import cost  # noqa: E402
from aiscale.config import Run  # noqa: E402
from ranks import TRAINING, run_ranks  # noqa: E402

SETUP = (
    TRAINING
    + """
BASE = ["model.n_layer=8", "model.n_head=2", "model.d_model=32", "loop.precision=fp64", "loop.global_batch=8",
        "loop.seq_len=16", "loop.micro_batch=1", "loop.device=cpu", "optimizer.clip_norm=0.5", "optimizer.eps=1e-5"]
LLAMA = ["model.norm=rmsnorm", "model.position=rotary", "model.activation=swiglu", "model.n_kv_head=1",
         "model.tied=false", "model.bias=false"]
"""
)

EQUAL = """
for settings in SETTINGS:
    model = tuple(LLAMA if "llama" in settings else ())
    run = Run().override(*BASE, *model, "parallel.strategy=pipeline", *(s for s in settings if s != "llama"))
    engine = build(run, world)
    errors = differences(engine, steps=4)
    before = world.traffic.groups()
    result, = train(engine, 4, 5)
    counts = world.traffic.groups_since(before)
    sent = {f"{op} {group.name}": [c.calls, c.payload_bytes] for (op, group), c in counts.items()}
    own = [p.numel() for p in engine.model.parameters()]
    same = world.gather((result.loss, result.grad_norm))
    held = held_bytes(engine.tensors())
    everything = world.gather({"errors": errors, "sent": sent, "held": held, "own": sum(own), "tensors": len(own)})
    if world.rank == 0:
        say(json.dumps({"settings": settings, "same": all(s == same[0] for s in same), "ranks": everything}))
"""

#: layouts that neither `aiscale verify` nor the byte table covers
FOUR = [["parallel.pp=4", "parallel.schedule=zero-bubble"]]
TWO = [
    ["parallel.pp=2", "parallel.schedule=1f1b", "model.activation_checkpointing=true"],
    ["parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=4", "llama"],
]


def measure(settings: list, n: int, folder) -> dict[str, dict]:
    done = run_ranks(SETUP + EQUAL.replace("SETTINGS", repr(settings)), n, folder, timeout=240)
    assert done.returncode == 0, done.stderr
    return {str(found["settings"]): found for found in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    known = {}

    def on(n: int) -> dict[str, dict]:
        if n not in known:
            known[n] = measure({4: FOUR, 2: TWO}[n], n, tmp_path_factory.mktemp("ranks"))
        return known[n]

    return on


@pytest.fixture
def found(request, measured):
    return measured(4 if request.param in FOUR else 2)[str(request.param)] | {"layout": request.param}


layouts = pytest.mark.parametrize(
    "found", [*(pytest.param(layout, marks=pytest.mark.extended) for layout in FOUR), *TWO], indirect=True, ids=" ".join
)


@layouts
def test_every_schedule_gives_serial_losses_norms_weights_and_evaluation(found):
    assert found["same"], "ranks disagree on the loss or the norm"
    for rank in found["ranks"]:
        assert max(rank["errors"].values()) < 1e-12, rank["errors"]


@layouts
def test_a_step_sends_activations_gradients_and_the_tied_embedding_to_the_byte(found):
    run = Run().override("model.n_layer=8", "parallel.strategy=pipeline", *(s for s in found["layout"] if s != "llama"))
    layout, tied, n = run.parallel, "llama" not in found["layout"], len(found["ranks"])
    dp = n // layout.pp
    n_micro, message, embedding = 8 // dp, 16 * 32 * 8, 256 * 32 * 8
    pieces = cost.stage_ranks(layout.pp, layout.virtual_stages)
    for rank, got in enumerate(found["ranks"]):
        row = rank // dp
        borders = sum(a != b and row in (a, b) for a, b in zip(pieces, pieces[1:], strict=False))
        label = "pp" if dp > 1 else "world"
        expected = {f"{way} {label}": [n_micro * borders, n_micro * borders * message] for way in ("send", "recv")}
        if tied and pieces[0] != pieces[-1] and row in (pieces[0], pieces[-1]):
            expected["all_reduce embedding"] = [1, embedding]
        if dp > 1:
            expected["all_reduce dp"] = [1, 8 * got["own"]]
        assert got["sent"] == expected


@layouts
def test_a_rank_holds_its_own_layers_and_a_buffer_for_each_message(found):
    for got in found["ranks"]:
        held, own = got["held"], got["own"]
        assert held["parameters"] == held["gradients"] == 8 * own
        assert held["optimizer states"] == 16 * own + 4 * got["tensors"]
        assert held["buffers"] % (16 * 32 * 8) == 0 and held["buffers"] >= sum(
            nbytes for way, (_, nbytes) in got["sent"].items() if way.startswith("recv")
        )


RESUMED = """
first = Run().override(*BASE, "parallel.strategy=pipeline", "parallel.pp=4", "parallel.schedule=1f1b")
second = Run().override(*BASE, "parallel.strategy=pipeline", "parallel.pp=2", "parallel.schedule=zero-bubble")
third = Run().override(*BASE, "parallel.strategy=ddp")
serial = serially(Run().override(*BASE))
expected = [r.loss for r in train(serial, 0, 4, 1)]
losses, path = [], None
for at, run in enumerate((first, first, second, third)):
    engine = build(run, world)
    if path:
        assert checkpoint.load(engine, path) == at
    losses += [r.loss for r in train(engine, at, at + 1)]
    path = checkpoint.save(engine, "checkpoints", step=at + 1)
weights = {name: torch.zeros_like(w) for name, w in serial.model.state_dict().items()}
world.from_rank0(lambda: checkpoint.load_weights(weights, path))
say(max(abs(a - b) for a, b in zip(losses, expected)) < 1e-12)
if world.rank == 0:
    whole = engine.state(full=True)
    assert all(torch.equal(weights[name], whole[name]) for name in whole)
"""


def test_a_checkpoint_resumes_exactly_with_other_stages_and_under_ddp(tmp_path):
    done = run_ranks(SETUP + RESUMED, 4, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True"] * 4


MIXED = """
for precision in ("bf16", "fp16"):
    settings = [f"loop.precision={precision}", "loop.micro_batch=2", "model.n_layer=2"]
    engine = build(Run().override(*BASE, *settings, "parallel.strategy=pipeline", "parallel.pp=2"), world)
    expected, results = train(serially(engine.run), 0, 3), train(engine, 0, 3)
    say(max(abs(a.loss - b.loss) + abs(a.grad_norm - b.grad_norm) for a, b in zip(results, expected)) < 2e-3)
before, scale = [p.clone() for p in engine.model.parameters()], engine.scaler.get_scale()
if world.rank == 1:  # in the last stage's gradients only
    next(engine.model.norm.parameters()).register_hook(lambda gradient: gradient * float("inf"))
result, = train(engine, 3, 4)
kept = all(torch.equal(p, b) for p, b in zip(engine.model.parameters(), before))
say(result.skipped and kept and engine.scaler.get_scale() == scale / 2)
"""


@pytest.mark.extended
def test_mixed_precision_matches_serial_and_an_overflow_on_one_stage_skips_the_step_on_all(tmp_path):
    done = run_ranks(SETUP + MIXED, 2, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True"] * 6


# The formulas --------------------------------------------------------------------------------------------------------

SHAPES = [
    ("gpipe", 4, 8, 1),
    ("gpipe", 2, 3, 1),
    ("1f1b", 4, 8, 1),
    ("1f1b", 4, 4, 1),
    ("interleaved", 4, 8, 2),
    ("interleaved", 2, 4, 4),
    ("interleaved", 3, 6, 3),
    ("zero-bubble", 4, 8, 1),
    ("zero-bubble", 3, 3, 1),
]
FEW = [("1f1b", 4, 2, 1), ("gpipe", 5, 2, 1), ("zero-bubble", 4, 2, 1)]


@pytest.mark.parametrize(("schedule", "pp", "n_micro", "virtual_stages"), SHAPES + FEW)
def test_the_simulated_step_has_the_predicted_bubble(schedule, pp, n_micro, virtual_stages):
    events = cost.pipeline_timeline(schedule, pp, n_micro, virtual_stages, forward_s=1.0, backward_s=2.0)
    expected = cost.bubble(schedule, pp, n_micro, virtual_stages)
    assert cost.idle_share(events) == pytest.approx([expected] * pp)


def test_the_formulas_match_the_papers():
    assert cost.bubble("gpipe", 4, 8) == cost.bubble("1f1b", 4, 8) == 3 / 8
    assert cost.bubble("interleaved", 4, 8, 2) == 3 / 16
    assert cost.bubble("zero-bubble", 4, 8) == 1 / 8


def test_gpipe_holds_every_micro_batch_and_1f1b_at_most_the_remaining_stages():
    assert cost.in_flight("gpipe", 4, 8) == [8] * 4
    assert cost.in_flight("1f1b", 4, 8) == [4, 3, 2, 1]
    assert cost.in_flight("1f1b", 4, 2) == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("schedule", "pp", "n_micro", "virtual_stages"),
    [shape for shape in SHAPES if shape[0] != "1f1b"],  # torch has no list of its order: see the traced steps
)
def test_the_schedules_order_equals_torchs(schedule, pp, n_micro, virtual_stages):
    from aiscale.parallel.pipeline import SCHEDULES

    kinds = {"FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "backward"}
    kinds |= {"BACKWARD_WEIGHT": "weights"}
    pieces, ours = pp * virtual_stages, cost.schedule_order(schedule, pp, n_micro, virtual_stages)
    kind = SCHEDULES[schedule]
    stages = [
        SimpleNamespace(num_stages=pieces, group_size=pp, group_rank=0, is_last=False, submod=torch.nn.Identity())
        for _ in range(virtual_stages)
    ]
    torchs = kind(stages[0] if schedule == "gpipe" else stages, n_micro).pipeline_order
    for rank in range(pp):
        actions = [a for a in torchs[rank] if a is not None and a.computation_type.name in kinds]
        theirs = [cost.Work(kinds[a.computation_type.name], a.stage_index, a.microbatch_index) for a in actions]
        assert ours[rank] == theirs


# The measured timeline -----------------------------------------------------------------------------------------------

TRACED = """
from instruments.trace import traced
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
torch.manual_seed(0)
x = torch.randn(8, 16)
for kind in (ScheduleGPipe, Schedule1F1B):
    stage = PipelineStage(torch.nn.Linear(16, 16), world.rank, 2, torch.device("cpu"))
    schedule = kind(stage, 8, loss_fn=torch.nn.functional.mse_loss)
    step = (lambda: schedule.step(x)) if world.rank == 0 else (lambda: schedule.step(target=x))
    events = world.gather(traced(step, forward_s=0.01, backward_s=0.02, steps=3))
    if world.rank == 0:
        say(json.dumps([event for mine in events for event in mine]))
"""


def test_a_traced_step_shows_all_work_in_the_order_of_the_schedule(tmp_path):
    done = run_ranks(SETUP + TRACED, 2, tmp_path)
    assert done.returncode == 0, done.stderr
    for schedule, line in zip(("gpipe", "1f1b"), done.stdout.splitlines(), strict=True):
        events = [cost.Event(*event) for event in json.loads(line)]
        least = {"forward": 0.01, "backward": 0.02}
        for rank, order in enumerate(cost.schedule_order(schedule, 2, 8)):
            mine = [event for event in events if event.rank == rank]
            assert [(e.kind, e.name) for e in mine] == [(w.kind, str(w.micro_batch)) for w in order]
            assert all(a.end_s <= b.start_s for a, b in zip(mine, mine[1:], strict=False))
            assert all(event.end_s - event.start_s >= least[event.kind] for event in mine)
