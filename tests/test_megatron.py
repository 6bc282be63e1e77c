"""Megatron-Core trains the same model as serial does, in every layout; its states survive and nothing of it leaks."""

import pytest
import torch

from aiscale.config import ConfigError, Run
from aiscale.parallel.megatron import engine as megatron
from ranks import run_ranks

SETUP = """
import copy, dataclasses
from aiscale.config import ParallelConfig, Run
from aiscale.distributed import Traffic, World
from aiscale.parallel import build
base = Run().override("model.n_layer=4", "model.n_head=4", "model.d_model=32", "model.max_seq_len=24",
                      "model.vocab_size=67", "loop.seq_len=16", "loop.global_batch=8", "loop.micro_batch=2",
                      "loop.precision=fp64", "loop.device=cpu", "optimizer.clip_norm=0.5")
torch.manual_seed(5)
data = [torch.randint(0, 67, (8, 17)) for _ in range(4)]
def share(batch, rank, size, micro):
    mine = batch[rank * 8 // size:(rank + 1) * 8 // size]
    return [(part[:, :-1], part[:, 1:]) for part in mine.split(micro)]
def train(engine, batches):
    micro = engine.run.loop.micro_batch
    return [engine.step(share(b, engine.data_rank, engine.data_world, micro), lr=1e-3) for b in batches]
def serial(run):
    alone = World(rank=0, size=1, local_rank=0, local_size=1, device=world.device, launcher="none", backend="gloo",
                  traffic=Traffic())
    engine = build(dataclasses.replace(run, parallel=ParallelConfig()), alone)
    steps = train(engine, data)
    return steps, engine.evaluate(share(data[0], 0, 1, 2)), engine.state(full=True)
def far(a, b):
    return max((a[name].double() - b[name].double()).abs().max().item() for name in b)
def compare(*settings):
    run = base.override("parallel.strategy=megatron", *settings)
    expected, evaluated, weights = serial(run) if world.is_main else (None, None, None)
    engine = build(run, world)
    steps = train(engine, data)
    value = engine.evaluate(share(data[0], engine.data_rank, engine.data_world, run.loop.micro_batch))
    full = engine.state(full=True)
    engine.close()
    assert len(set(world.gather((tuple(steps), value)))) == 1, "ranks disagree"
    if world.is_main:
        assert [s.tokens for s in steps] == [s.tokens for s in expected] and full.keys() == weights.keys()
        loss = max(abs(a.loss - b.loss) for a, b in zip(steps, expected))
        norm = max(abs(a.grad_norm - b.grad_norm) for a, b in zip(steps, expected))
        loss, weight = max(loss, abs(value[0] - evaluated[0])), far(full, weights)
        limits = {"fp64": (1e-10, 1e-10, 1e-9), "fp32": (2e-6, 2e-5, 2e-4), "bf16": (5e-3, 1e-2, 5e-3)}
        limit = limits[run.loop.precision]
        say(loss < limit[0] and norm < limit[1] and weight < limit[2] or (settings, loss, norm, weight))
"""

LLAMA = (
    "model.norm=rmsnorm",
    "model.position=rotary",
    "model.activation=swiglu",
    "model.bias=false",
    "model.tied=false",
    "model.n_kv_head=2",
)
EXPERTS = ("model.n_expert=4", "model.bias=false", "model.d_ff=48")
TWO = [
    ("parallel.ep=2", *EXPERTS),
    ("parallel.ep=2", "model.activation=swiglu", "model.experts_per_token=1", *EXPERTS),
    ("parallel.tp=2",),
    ("parallel.tp=2", "loop.precision=bf16"),
    ("parallel.tp=2", *LLAMA),
    ("parallel.tp=2", "parallel.sequence_parallel=true"),
    ("parallel.tp=2", "parallel.sequence_parallel=true", *LLAMA),
    ("parallel.pp=2", "model.activation_checkpointing=true"),
    ("parallel.pp=2", "optimizer.name=sgd", "model.tied=false", "loop.micro_batch=8"),
    ("parallel.distributed_optimizer=true", "loop.precision=bf16"),
]
FOUR = [
    ("parallel.ep=2", "parallel.pp=2", "model.activation_checkpointing=true", *EXPERTS),
    ("parallel.ep=2", *EXPERTS),
    ("parallel.tp=2", "parallel.pp=2"),
    ("parallel.tp=2", "parallel.distributed_optimizer=true", "loop.precision=fp32"),
    ("parallel.pp=4", "parallel.virtual_stages=2", "parallel.schedule=interleaved", "model.n_layer=8"),
]
EIGHT = [("parallel.tp=2", "parallel.pp=2", "parallel.distributed_optimizer=true", "loop.precision=fp32")]


@pytest.mark.parametrize(("n", "layouts"), [(2, TWO), (4, FOUR), (8, EIGHT)], ids=["2", "4", "8"])
def test_every_layout_gives_serials_losses_norms_and_weights(n, layouts, tmp_path):
    code = SETUP + "".join(f"compare(*{layout!r})\n" for layout in layouts)
    done = run_ranks(code, n, tmp_path, strategy="megatron")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True"] * len(layouts)


RESUME = """
from pathlib import Path
from aiscale import checkpoint
folder = Path(FOLDER)
def layout(*settings):
    return base.override("parallel.strategy=megatron", "loop.precision=fp32", "loop.micro_batch=1", *settings)
first = layout("parallel.tp=2", "parallel.distributed_optimizer=true")
engine = build(first, world)
train(engine, data[:2])
path = checkpoint.save(engine, folder, step=2)
kept, mine = engine.state(full=True), copy.deepcopy(engine.state())
expected = train(engine, data[2:])
engine.load(mine)
say("in memory", train(engine, data[2:]) == expected)
engine.close()
others = [("parallel.pp=2",), ("parallel.tp=2", "parallel.pp=2"), ("parallel.tp=4",),
          ("parallel.pp=2", "parallel.distributed_optimizer=true")]
for run in [first, *(layout(*settings) for settings in others)]:
    engine = build(run, world)
    step = checkpoint.load(engine, path)
    same = engine.state(full=True)
    equal = not world.is_main or all(torch.equal(same[name], kept[name]) for name in kept)
    steps = train(engine, data[2:])
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


def test_a_run_goes_on_exactly_and_in_another_layout(tmp_path):
    done = run_ranks(SETUP + RESUME.replace("FOLDER", repr(str(tmp_path / "ck"))), 4, tmp_path, strategy="megatron")
    assert done.returncode == 0, done.stderr
    lines = ["True"] * 20 + ["in memory True"] * 4 + ["refused True True"] * 4 + ["alone True"]
    assert sorted(done.stdout.splitlines()) == sorted(lines)


EXPERTS_RESUME = """
from pathlib import Path
from aiscale import checkpoint
def layout(*settings):
    return base.override("parallel.strategy=megatron", "loop.micro_batch=1", *EXPERTS, *settings)
first = layout("parallel.ep=2")
engine = build(first, world)
train(engine, data[:2])
path = checkpoint.save(engine, Path(FOLDER), step=2)
kept = engine.state(full=True)
expected = train(engine, data[2:])
engine.close()
for run in [first, layout("parallel.ep=4"), layout(), layout("parallel.ep=2", "parallel.pp=2")]:
    engine = build(run, world)
    checkpoint.load(engine, path)
    same = engine.state(full=True)
    equal = not world.is_main or all(torch.equal(same[name], kept[name]) for name in kept)
    steps = train(engine, data[2:])
    off = max(abs(a.loss - b.loss) + abs(a.grad_norm - b.grad_norm) for a, b in zip(steps, expected))
    say(equal and (steps == expected if run == first else off < 1e-10) or (run.parallel, off))
    engine.close()
"""


def test_experts_go_on_exactly_and_divided_otherwise(tmp_path):
    code = EXPERTS_RESUME.replace("FOLDER", repr(str(tmp_path / "ck"))).replace("EXPERTS", repr(EXPERTS))
    done = run_ranks(SETUP + code, 4, tmp_path, strategy="megatron")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True"] * 16


CLEAN = """
import megatron.core.tensor_parallel.random as random
from aiscale.parallel.megatron.adapt import adapted
from torch.overrides import _get_current_function_mode_stack
def look():
    names = ("current_device", "synchronize", "get_rng_state", "manual_seed")
    return [getattr(torch.cuda, name) for name in names] + [random._get_cuda_rng_state, random._set_cuda_rng_state]
was = look()
engine = build(base.override("parallel.strategy=megatron", "parallel.tp=2"), world)
train(engine, data[:1])
try:
    engine.step([(data[0][:3, :-1], data[0][:2, 1:])], lr=1e-3)  # raises inside Megatron-Core
except Exception:
    say("raised", look() == was and not _get_current_function_mode_stack(), torch.ones(1).type())
engine.close()
other = build(base.override("parallel.strategy=ddp"), world)
steps = train(other, data)
other.close()
if world.is_main:
    say("ddp as ever", max(abs(a.loss - b.loss) for a, b in zip(steps, serial(base)[0])) < 1e-12)
"""


def test_nothing_of_the_adaptation_is_left_behind(tmp_path):
    done = run_ranks(SETUP + CLEAN, 2, tmp_path, strategy="megatron")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["ddp as ever True", *["raised True torch.FloatTensor"] * 2]


TRACE = """
from aiscale.parallel.trace import ScheduleTrace
run = base.override("parallel.strategy=megatron", "parallel.pp=4", "parallel.virtual_stages=2",
                    "parallel.schedule=interleaved", "model.n_layer=8")
engine = build(run, world)
trace = ScheduleTrace(engine, forward_s=0.02, backward_s=0.04)
batch = share(data[0], 0, 1, 2)
world.barrier()
trace.start()
engine.step(batch, lr=1e-3)
events = trace.stop()
engine.step(batch, lr=1e-3)  # nobody listens any more
kinds = {kind: [e.name for e in events if e.kind == kind] for kind in ("forward", "backward", "optimizer")}
work = sorted(f"{micro}.{chunk}" for micro in range(4) for chunk in range(2))
say(sorted(kinds["forward"]) == work, sorted(kinds["backward"]) == work, kinds["optimizer"] == ["optimizer"],
    kinds["forward"][:5] == ["0.0", "1.0", "2.0", "3.0", "0.1"], kinds["backward"][0] == "0.1",
    all(e.rank == world.rank and 0 <= e.start_s <= e.end_s for e in events), trace.stop() == events,
    all(e.end_s - e.start_s > {"forward": 0.009, "backward": 0.019}.get(e.kind, -1) for e in events))
"""


def test_a_trace_shows_every_pass_of_every_micro_batch_on_every_stage(tmp_path):
    done = run_ranks(SETUP + TRACE, 4, tmp_path, strategy="megatron")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [" ".join(["True"] * 8)] * 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("model.parallel_residual=true",), "Megatron-Core's layers feed the MLP with what attention gave"),
        (("loop.precision=fp16",), "only fp32, tf32, bf16 and fp64 are carried"),
        (("loop.precision=fp64", "parallel.distributed_optimizer=true"), "Megatron-Core's knows fp32, bf16 and fp16"),
        (("optimizer.name=sgd", "parallel.distributed_optimizer=true"), "divides AdamW's states only"),
        (("parallel.tp=4", "parallel.sequence_parallel=true", "loop.seq_len=30"), "seq_len 30 is not divisible by"),
    ],
)
def test_what_it_cannot_carry_is_refused_in_one_line(settings, message):
    run = Run().override("parallel.strategy=megatron", *settings)
    with pytest.raises(ConfigError, match=message) as refusal:
        megatron.check(run)
    assert "\n" not in str(refusal.value)


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path):
    code = """
    from aiscale.config import Run
    from aiscale.parallel import build
    run = Run().override("parallel.strategy=megatron", "parallel.tp=2", "model.vocab_size=67", "loop.seq_len=4",
                         "model.n_layer=1", "model.d_model=16")
    tokens = torch.full((2, 4), 67)
    build(run, world).step([(tokens, tokens)], lr=1e-3)
    """
    done = run_ranks(code, 2, tmp_path, strategy="megatron")
    assert "token 67, but model.vocab_size 67 ends at 66" in done.stderr


def test_upstream_context_parallelism_needs_transformer_engine():
    """Why no option offers it: Megatron-Core's own attention refuses, and only Transformer Engine's has it."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, context_parallel_size=2)
    with pytest.raises(AssertionError, match="Context parallelism is only supported by TEDotProductAttention"):
        DotProductAttention(config, 1, AttnMaskType.causal, "self")


def test_upstream_sequence_parallelism_is_refused_by_torchs_norm():
    """Why the norms in the layer spec are ours."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    options = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **options)
    with pytest.raises(AssertionError, match="sequence parallel not supported by torch LayerNorm"):
        WrappedTorchNorm(config, 8)


def test_upstream_the_distributed_optimizer_refuses_fp64():
    """Why fp64 goes without it."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    ranges = [{"x": [{"param_map": {weight: {"param": None}}}]}]
    with pytest.raises(TypeError, match="Wrapped parameters must be one of"):
        DistributedOptimizer._build_model_and_main_param_groups(
            ranges, {weight: (0, "x", 0)}, [{"params": [weight]}], None
        )
