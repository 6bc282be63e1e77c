"""Megatron-Core trains the same model as serial in every layout; its checkpoints resume, and its patches stay local."""

import importlib.util
import subprocess
import sys

import pytest

from ranks import TRAINING, run_ranks

SETUP = (
    TRAINING
    + """
base = Run().override("model.n_layer=4", "model.n_head=4", "model.d_model=32", "model.max_seq_len=24",
                      "model.vocab_size=67", "loop.seq_len=16", "loop.global_batch=8", "loop.micro_batch=2",
                      "loop.precision=fp64", "loop.device=cpu", "optimizer.clip_norm=0.5", "parallel.strategy=megatron")
def compare(*settings):
    engine = build(base.override(*settings), world)
    off, precision = differences(engine, steps=4), engine.run.loop.precision
    engine.close()
    told = world.gather([off["loss"], off["norm"]])
    assert all(numbers == told[0] for numbers in told), "ranks disagree"
    limits = {"fp64": (1e-10, 1e-10, 1e-9), "bf16": (5e-3, 1e-2, 5e-2), "fp16": (1e-3, 5e-3, 5e-2)}[precision]
    if world.is_main:
        say(all(value < limit for value, limit in zip(off.values(), limits)) or (settings, off))
"""
)

WITHOUT_TRITON = """
from importlib.util import find_spec
from aiscale import without_gpu
without_gpu.prepare_megatron()
from megatron.core.models.hybrid.hybrid_model import HybridModel
print(HybridModel.__name__, find_spec("triton"))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is here: nothing stands in for it")
def test_a_script_imports_megatron_core_without_triton_and_no_other_library_finds_one():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("HybridModel None\n", ""), done.stderr


RECOMPUTED = "model.activation_checkpointing=true"
LAYOUTS = [
    ("parallel.tp=2", "loop.precision=bf16"),
    ("parallel.pp=2", RECOMPUTED),
    ("parallel.pp=2", "optimizer.name=sgd", "model.tied=false", "loop.micro_batch=8"),
    ("parallel.distributed_optimizer=true", "loop.precision=bf16"),
    ("parallel.distributed_optimizer=true", "loop.precision=fp16"),
]


@pytest.mark.extended
def test_layouts_outside_the_ladder_give_serial_losses_norms_and_weights(tmp_path):
    code = SETUP + "".join(f"compare(*{layout!r})\n" for layout in LAYOUTS)
    done = run_ranks(code, 2, tmp_path, strategy="megatron")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True"] * len(LAYOUTS)


RESUME = """
folder = Path(FOLDER)
def layout(*settings):
    return base.override("loop.precision=fp32", "loop.micro_batch=1", *settings)
first = layout("parallel.tp=2", "parallel.distributed_optimizer=true")
engine = build(first, world)
train(engine, 0, 2)
path = checkpoint.save(engine, folder, step=2)
kept = {name: tensor.clone() for name, tensor in engine.state(full=True).items()}
expected = train(engine, 2, 4)
engine.close()
others = [("parallel.pp=2",), ("parallel.tp=2", "parallel.pp=2"), ("parallel.tp=4",),
          ("parallel.pp=2", "parallel.distributed_optimizer=true")]
for run in [first, *(layout(*settings) for settings in others)]:
    engine = build(run, world)
    step = checkpoint.load(engine, path)
    same = engine.state(full=True)
    equal = not world.is_main or all(torch.equal(same[name], kept[name]) for name in kept)
    steps = train(engine, 2, 4)
    off = max(abs(a.loss - b.loss) + abs(a.grad_norm - b.grad_norm) for a, b in zip(steps, expected))
    say(step == 2 and equal and (steps == expected if run == first else off < 5e-6) or (run.parallel, off))
    engine.close()
if world.is_main:
    weights = {name: torch.zeros_like(tensor) for name, tensor in kept.items()}
    checkpoint.load_weights(weights, path)
    say("alone", all(torch.equal(weights[name], kept[name]) for name in kept))
wrong = build(layout("parallel.tp=2", "model.d_model=64"), world)
before = wrong.state(full=True)
try:
    checkpoint.load(wrong, path)
except checkpoint.CheckpointError as error:
    refusal = str(error)
after = wrong.state(full=True)
say("refused", "d_model 32, this run has 64" in refusal, all(torch.equal(after[name], before[name]) for name in before))
wrong.close()
"""


@pytest.mark.extended
def test_a_run_resumes_exactly_and_in_another_layout(tmp_path):
    done = run_ranks(SETUP + RESUME.replace("FOLDER", repr(str(tmp_path / "ck"))), 4, tmp_path, strategy="megatron")
    assert done.returncode == 0, done.stderr
    lines = ["True"] * 20 + ["refused True True"] * 4 + ["alone True"]
    assert sorted(done.stdout.splitlines()) == sorted(lines)


OVERFLOW = """
run = base.override("loop.precision=fp16", "parallel.pp=2")
engine = build(run, world)
train(engine, 0, 1)
before = engine.state(full=True)
engine._scaler._scale.fill_(2.0**30)  # gradients of either stage overflow
skipped = [result.skipped for result in train(engine, 1, 3)]  # it halves after two
after = engine.state(full=True)
path, scale = checkpoint.save(engine, Path(FOLDER), step=3), engine._scaler.scale.item()
engine.close()
engine = build(run, world)
checkpoint.load(engine, path)
say(all(skipped), scale == engine._scaler.scale.item() == 2.0**29, all(before[n].equal(after[n]) for n in before))
"""


@pytest.mark.extended
def test_an_overflow_in_fp16_skips_the_step_and_the_loss_scale_is_saved(tmp_path):
    code = SETUP + OVERFLOW.replace("FOLDER", repr(str(tmp_path / "ck")))
    done = run_ranks(code, 2, tmp_path, strategy="megatron")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True True True"] * 2


CLEAN = """
import megatron.core.tensor_parallel.random as random
def look():
    names = ("current_device", "synchronize", "get_rng_state", "manual_seed")
    return [getattr(torch.cuda, name) for name in names] + [dict(vars(random))]
was = look()
engine = build(base.override("parallel.tp=2"), world)
train(engine, 0, 1)
try:
    engine.step([(torch.ones(3, 16, dtype=int), torch.ones(2, 16, dtype=int))], lr=1e-3)  # raises inside Megatron-Core
except Exception:
    now = look()
    same = now[:-1] == was[:-1] and all(now[-1][name] is value for name, value in was[-1].items() if callable(value))
    say("raised", same, torch.ones(1).type())  # inside it would say torch.cuda.FloatTensor
engine.close()
other = build(base.override("parallel.strategy=ddp"), world)
say("ddp as ever", max(differences(other).values()) < 1e-12)
"""


@pytest.mark.extended
def test_nothing_of_the_adaptation_is_left_behind(tmp_path):
    done = run_ranks(SETUP + CLEAN, 2, tmp_path, strategy="megatron")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [*["ddp as ever True"] * 2, *["raised True torch.FloatTensor"] * 2]
