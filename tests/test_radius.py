"""Radius on real ranks: bit-equal to dense where it should be, nothing lost, bytes, resuming, one-line errors."""

import json
import textwrap

import pytest

from ranks import aiscale, run_ranks

TINY = ("model.n_layer=2", "model.n_head=2", "model.d_model=32", "model.vocab_size=64", "loop.device=cpu")

SETUP = """
import json, tempfile
from aiscale import checkpoint, cost
from aiscale.config import Run
from aiscale.meter import held_bytes
from aiscale.parallel import build
from aiscale.parallel.compress import GradientError
from aiscale.parallel.radius import MaskError, SimulatedRanks
torch.set_num_threads(1)
base = Run().override(*TINY, "parallel.strategy=ddp", "loop.seq_len=16", "loop.global_batch=12",
                           "parallel.bucket_mb=0.05")
radius = base.override("compression.method=radius", "compression.density=0.3", "compression.interval=3")
lr, n = 1e-2, world.size
def shares(step, n_micro=1):
    torch.manual_seed(step)
    tokens = torch.randint(0, 64, (n, 2, 17))
    return [[(part[:, :-1], part[:, 1:]) for part in mine.chunk(n_micro)] for mine in tokens]
def train(engine, steps, first=0, n_micro=1):
    for step in range(first, steps):
        engine.step(shares(step, n_micro)[world.rank], lr)
    return engine
def weights(engine):
    return torch.cat([p.detach().reshape(-1) for p in engine.model.parameters()])
def trained(run, steps=7, **how):
    return weights(train(build(run, world), steps, **how))
def together(engine, tensors):
    return torch.cat([tensors[p] for p in engine.compressor.names])
"""

CASES = """
def full_density_is_ddp():
    return torch.equal(trained(radius.override("compression.density=1")), trained(base))

def so_in_bf16_and_with_two_micro_batches():
    half = ["compression.wire=bf16"]
    dense, full = trained(base.override(*half)), [*half, "compression.density=1", "compression.residual=none"]
    runs = [[*half, "compression.warmup_steps=7"], [*half, "compression.interval=1"], full]
    same = [torch.equal(trained(radius.override(*more)), dense) for more in runs]
    same.append(torch.equal(*(trained(run, n_micro=2) for run in (base, radius.override("compression.density=1")))))
    return all(same)

def conserved():
    settings = ("loop.precision=fp64", "optimizer.clip_norm=0", "compression.interval=4")
    engine = build(radius.override(*settings), world)
    local = {p: torch.zeros_like(p) for p in engine.compressor.names}
    pack, applied = engine.compressor.pack, {p: torch.zeros_like(p) for p in local}
    def noting(bucket):
        for p, gradient in zip(bucket.parameters, bucket.gradients):
            local[p] += gradient
        return pack(bucket)
    engine.compressor.pack = noting
    for step in range(7):  # ends between refreshes
        train(engine, step + 1, first=step)
        for p in applied:
            applied[p] += p.grad
    residual = together(engine, engine.compressor.residual)
    waiting = residual.abs().sum().item() > 0
    means = [torch.cat([t[p].reshape(-1) for p in local]) for t in (local, applied)]
    for tensor in (residual, means[0]):
        dist.all_reduce(tensor.div_(n))
    return waiting and (means[1] + residual - means[0]).abs().max().item() < 1e-14

def payload():
    rows = []
    for settings in ([], ["compression.wire=bf16"], ["compression.overlap=false"]):
        run = radius.override(*settings)
        engine = train(build(run, world), 2)  # before the second step, DDP tells all ranks its new buckets
        for step in range(2, 5):
            before, control = world.traffic.snapshot(), world.traffic.control_counts
            train(engine, step + 1, first=step)
            sent = world.traffic.since(before)
            apart = sum(c.payload_bytes for c in world.traffic.control_counts.values())
            apart -= sum(c.payload_bytes for c in control.values())
            ((op, _), count), = sent.items()
            expected = cost.gradient_traffic(run, n, dense=engine.compressor.is_dense(step))
            kept = engine.compressor.entries() * cost.wire_entry_bytes(run)
            right = {(op, "world"): count.payload_bytes} == expected and apart > 0
            right = right and (step == 3 or kept == count.payload_bytes)
            rows.append(right and (count.calls == 1) == (not run.compression.overlap))
    return rows == [True] * 9

def resumed(settings=(), steps=range(1, 7)):
    run = radius.override("compression.warmup_steps=2", *settings)
    expected, apart = trained(run, 8), []
    engine, done = build(run, world), 0
    folder = world.from_rank0(tempfile.mkdtemp)
    for step in steps:
        train(engine, step, first=done)
        done = step
        checkpoint.save(engine, folder, step=step)
        again = build(run, world)
        assert checkpoint.load(again, checkpoint.latest(folder)) == step
        apart.append((weights(train(again, 8, first=step)) - expected).abs().max().item())
    return apart

def resumed_otherwise():
    lost = ["compression.residual=none", "compression.range=1"]
    return [resumed(settings, steps=[3, 5]) for settings in (
        ["compression.wire=bf16"], lost)]

def resumed_in_other_buckets():  # DDP's first ones; of three numbers the sum depends on where they lie
    return resumed(["loop.precision=fp64"], steps=[4])

def reference():
    found = []
    for settings in ([], ["compression.residual=mean"], ["compression.range=1"],
                     ["compression.residual=none", "optimizer.name=sgd"]):
        run = radius.override("loop.precision=fp64", *settings)
        mine = trained(run, 8, n_micro=2)
        engine = SimulatedRanks(run, n)
        for step in range(8):
            engine.step(shares(step, 2), lr)
        alone = weights(engine)
        found.append((mine - alone).abs().max().item())
    return max(found) < 1e-12 and (n > 2 or max(found) == 0)

def overlap_changes_nothing():
    run = radius.override("loop.precision=fp64")
    one = trained(run.override("compression.overlap=false"), n_micro=2)
    return (one - trained(run, n_micro=2)).abs().max().item() < (1e-12 if n > 2 else 1e-300)

def held():
    engine = train(build(radius.override("parallel.bucket_mb=25"), world), 3)
    measured = held_bytes(engine.tensors())
    small = held_bytes(train(build(radius, world), 3).tensors())
    return measured["compression"] == small["compression"] == cost.radius_held(radius) == (4 + 1) * len(weights(engine))

def not_finite():
    engine, said = train(build(radius, world), 2), []
    weight, step = engine.model.blocks[1].mlp.up.weight, engine.compressor.step
    at = (~engine.compressor.mask[weight]).nonzero()[0].item()
    def poison(gradient):
        gradient = gradient.clone()
        gradient.view(-1)[at] = float("nan") if world.rank == 1 else 0
        return gradient
    weight.register_hook(poison)
    before = weights(engine).clone()
    for act in (lambda: train(engine, 3, first=2), engine.state):
        try:
            act()
        except GradientError as error:
            assert said or error.failed_alike
            said.append(str(error))
    return said + [torch.equal(weights(engine), before) and engine.compressor.step == step]

def planted_mask():
    engine = train(build(radius, world), 3)
    if world.rank == 1:
        engine.optimizer.state[engine.model.blocks[0].attn.qkv.weight]["exp_avg"].mul_(-7)
    try:
        train(engine, 4, first=3)
    except MaskError as error:
        assert error.failed_alike
        return str(error)

found = {name: globals()[name]() for name in NAMES}
if world.is_main:
    say(json.dumps(found))
"""

#: `aiscale verify` has the same for a warm-up and an interval of 1, up to rounding.
BITS = ["full_density_is_ddp", "so_in_bf16_and_with_two_micro_batches"]
ALWAYS = [*BITS, "conserved", "reference", "overlap_changes_nothing", "not_finite", "planted_mask"]
AT_2 = [*ALWAYS, "payload", "resumed", "resumed_otherwise", "held"]
AT_3 = [*ALWAYS, "resumed_in_other_buckets"]
#: What the fast tests read; the rest takes a second job of two ranks.
FAST = ["full_density_is_ddp", "conserved"]
FAST += ["reference", "overlap_changes_nothing", "not_finite", "planted_mask", "payload", "resumed"]
FAST += ["held"]


def ranks(names: list[str], n: int, folder) -> dict:
    head = f"TINY = {TINY!r}\nNAMES = {names!r}\n"
    done = run_ranks(head + textwrap.dedent(SETUP + CASES), n, folder, strategy="ddp")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory):
    """on_ranks(n): the results of the cases for n ranks."""

    class Found(dict):
        def __init__(self, n: int, names: list[str]) -> None:
            self.n, self.names = n, names

        def __missing__(self, case: str):
            mine = [name for name in self.names if (name in FAST) == (case in FAST) or self.n == 3]
            self.update(ranks(mine, self.n, tmp_path_factory.mktemp("ranks")))
            return self[case]

    return {2: Found(2, AT_2), 3: Found(3, AT_3)}.__getitem__


@pytest.fixture(scope="module")
def at_2_ranks(on_ranks):
    return on_ranks(2)


#: Also on three ranks, where a sum depends on its order and a third is not exact in binary.
on_both = pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.extended)])


def tiered(case: str):
    return pytest.param(case, marks=[] if case in FAST else pytest.mark.extended)


@on_both
@pytest.mark.parametrize("case", [tiered(case) for case in BITS])
def test_radius_equals_ddp_bit_for_bit_if_everything_is_sent(case, n, on_ranks):
    assert on_ranks(n)[case] is True


@on_both
def test_no_gradient_is_lost(n, on_ranks):
    assert on_ranks(n)["conserved"] is True


@on_both
def test_one_process_simulating_n_ranks_gives_the_weights_of_n_processes(n, on_ranks):
    assert on_ranks(n)["reference"] is True


@on_both
def test_one_message_after_the_backward_pass_gives_the_weights_of_overlapped_messages(n, on_ranks):
    assert on_ranks(n)["overlap_changes_nothing"] is True


def test_a_step_sends_the_predicted_bytes_and_checks_are_counted_separately(at_2_ranks):
    assert at_2_ranks["payload"] is True


def test_a_run_resumed_from_any_step_ends_at_the_same_weights(at_2_ranks):
    assert at_2_ranks["resumed"] == [0] * 6


@pytest.mark.extended
def test_runs_with_bf16_and_without_residual_resume_exactly(at_2_ranks):
    assert at_2_ranks["resumed_otherwise"] == [[0, 0]] * 2


@pytest.mark.extended
def test_a_run_resumed_on_three_ranks_differs_only_by_rounding(on_ranks):
    (apart,) = on_ranks(3)["resumed_in_other_buckets"]
    assert apart < 1e-12


def test_memory_is_one_residual_and_a_byte_of_mask_an_entry(at_2_ranks):
    assert at_2_ranks["held"] is True


@on_both
def test_a_nonfinite_gradient_stops_all_ranks_and_is_not_saved(n, on_ranks):
    first, second, untouched = on_ranks(n)["not_finite"]
    assert first.startswith("the gradient of blocks.1.mlp.up.weight on rank 1 is not finite at step 3; ")
    assert second == f"nothing is saved after a step that was interrupted: {first}" and untouched


@on_both
def test_a_rank_that_selected_other_entries_stops_the_run(n, on_ranks):
    error = on_ranks(n)["planted_mask"]
    who, apart = ("rank 0, 1 of 2", "each other") if n == 2 else ("rank 1 of 3", "the rest")
    assert error.startswith(f"after step 4 {who} chose other gradient entries than {apart}, ")
    assert "\n" not in error


@pytest.mark.extended
def test_radius_trains_resumes_and_refuses_from_the_command_line(tmp_path):
    def train(nproc: int, steps: int, *settings: str, resume: bool = True):
        shape = (*TINY[:3], "loop.global_batch=6", "loop.seq_len=16", "loop.eval_batches=1", f"loop.steps={steps}")
        settings = (*shape, "loop.device=cpu", "parallel.strategy=ddp", *settings)
        words = [word for setting in settings for word in ("--set", setting)]
        words += ["--quiet", "--runs-dir", str(tmp_path), "--nproc", str(nproc)] + ["--resume"] * resume
        done = aiscale("train", "--recipe", "laptop", *words, env={"OMP_NUM_THREADS": "1"})
        return done.returncode, done.stderr.strip()

    radius = ("compression.method=radius", "compression.density=0.5", "compression.interval=4")
    assert train(2, 3, resume=False) == (0, "")
    assert train(2, 5, *radius) == (0, "")  # a dense run resumes with Radius, as the published ones did
    assert train(2, 7, *radius) == (0, "")  # between two refreshes
    status, error = train(3, 9, *radius)
    assert status == 2 and error == (
        "aiscale: the checkpoint holds the unsent gradients of 2 ranks, but there are 3: start 2, "
        "or drop them with compression.method=none"
    )
    status, error = train(2, 9, *radius[:1], "compression.density=0.25", radius[2])
    assert status == 2 and error.startswith(
        "aiscale: the checkpoint was written with compression.density=0.5, not 0.25: set that again"
    )
    status, error = train(2, 9, *radius, "optimizer.lr=1e30", "optimizer.clip_norm=0")
    assert status != 0 and error.startswith("aiscale: the gradient of ") and "\n" not in error
    assert " is not finite at step 9; compression.method radius would keep it: lower optimizer.lr (now 1e+30) " in error
    assert train(3, 8) == (0, "")  # back to dense gradients, with another number of ranks
    lines = (tmp_path / "laptop/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records if record["kind"] == "train"] == list(range(1, 9))
