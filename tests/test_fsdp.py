"""FSDP: serial losses in every variant, exact bytes sent and held, checkpoints for other world sizes."""

import json

import pytest
import torch

from aiscale import checkpoint
from aiscale.config import Run
from aiscale.distributed import connect
from aiscale.model.build import build_model
from aiscale.parallel import build
from ranks import TRAINING, run_ranks

TINY = ["model.n_layer=3", "model.n_head=2", "model.d_model=32", "model.vocab_size=67", "model.max_seq_len=16"]
TINY += ["loop.seq_len=16", "loop.global_batch=12", "loop.device=cpu", "loop.precision=fp64", "optimizer.clip_norm=0.5"]

SETUP = f"""{TRAINING}
base = Run().override(*{TINY!r})
def make(*settings, strategy="fsdp"):
    return build(base.override(f"parallel.strategy={{strategy}}", *settings), world)
"""
LLAMA = ("model.norm=rmsnorm", "model.position=rotary", "model.activation=swiglu", "model.tied=false")


def ranks(code: str, n: int, tmp_path, **options) -> list:
    done = run_ranks(SETUP + code, n, tmp_path, strategy="fsdp", **options)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


KEPT = "parallel.reshard_after_forward=false"
RECOMPUTED = "model.activation_checkpointing=true"
EQUAL = """
for settings, n_micro in CASES:
    engine = make(*settings)
    off = differences(engine, n_micro)
    before, held = world.traffic.groups(), held_bytes(engine.tensors())
    train(engine, 6, 7, n_micro)
    sent = {op: count.payload_bytes for (op, _), count in world.traffic.groups_since(before).items()}
    engine.evaluate(share(engine, 99))
    say(json.dumps([off, sent, held_bytes(engine.tensors()) != held]))
    engine.close()
"""


@pytest.mark.parametrize(
    ("n", "cases"),
    [
        (2, [(("optimizer.name=sgd",), 1), ((KEPT, RECOMPUTED), 2)]),
        pytest.param(4, [(("parallel.replicas=4", *LLAMA, RECOMPUTED), 1)], marks=pytest.mark.extended),
    ],
)
def test_variants_outside_the_ladder_give_serial_losses_norms_and_weights(n, cases, tmp_path):
    lines = ranks(EQUAL.replace("CASES", repr(cases)), n, tmp_path)
    assert len(lines) == n * len(cases)
    for off, sent, gathered in lines:
        assert max(off.values()) < 1e-10, off
        assert not gathered, "what evaluate gathers must go"
        if n == 4:  # as many replicas as ranks: nothing is sharded
            model = build_model(Run().override(*TINY, *LLAMA).model)
            assert sent == {"all_reduce": 8 * sum(p.numel() for p in model.parameters())}


@pytest.mark.extended
def test_narrow_messages_give_fp32s_losses_to_their_precision(tmp_path):
    code = f"""
for model in (("loop.precision=bf16",), ("loop.precision=bf16", *{LLAMA!r}), ("loop.precision=fp16",)):
    engine = make(*model)
    found = train(engine, 0, 8, 2)
    expected = train(serially(base.override(*model, "loop.precision=fp32")), 0, 8, 1)
    masters = {{str(p.dtype) for p in engine.model.parameters()}}
    say(json.dumps([max(abs(a.loss - b.loss) for a, b in zip(found, expected)), sorted(masters)]))
    if model != ("loop.precision=fp16",):
        engine.close()
before, scale = [p.to_local().clone() for p in engine.model.parameters()], engine.scaler.get_scale()
engine.accumulate(share(engine, 8))
if world.rank == 1:  # in one rank's shard only
    next(engine.model.parameters()).grad.to_local().view(-1)[0] = float("inf")
_, skipped = engine.update(1e-3)
kept = all(p.to_local().equal(b) for p, b in zip(engine.model.parameters(), before))
say(json.dumps([skipped and kept and engine.scaler.get_scale() == scale / 2, "overflow"]))
"""
    for off, masters in ranks(code, 2, tmp_path):
        if masters == "overflow":
            assert off is True
        else:
            assert 1e-6 < off < 2e-2
            assert masters == ["torch.float32"]


WRITE = """
engine = make()
train(engine, 0, 3, 2)
path = checkpoint.save(engine, Path("two"), step=3)
straight = train(engine, 3, 6, 2)
resumed, other = make(), make()
checkpoint.load(resumed, path)
checkpoint.load(other, Path("serial/step_00000003"))
again = train(resumed, 3, 6, 2)
say(json.dumps([[a == b for a, b in zip(straight, again)], [r.loss for r in train(other, 3, 6, 1)]]))
"""
REOPEN = """
for options in ({}, {"strategy": "ddp"}):
    engine = make(**options)
    assert checkpoint.load(engine, Path("two/step_00000003")) == 3
    say(json.dumps([result.loss for result in train(engine, 3, 6, 1)]))
    engine.close()
"""


def test_a_checkpoint_resumes_exactly_and_opens_under_other_ranks_ddp_and_serial(tmp_path):
    run = Run().override(*TINY)
    engine = build(run, world := connect("cpu"))

    def train(engine, first, last):
        return [engine.step(_batch(s), lr=1e-2 / (s + 1)).loss for s in range(first, last)]

    train(engine, 0, 3)
    checkpoint.save(engine, tmp_path / "serial", step=3)
    expected = pytest.approx(train(engine, 3, 6), abs=1e-10)
    for same, losses in ranks(WRITE, 2, tmp_path):
        assert same == [True] * 3 and losses == expected
    for losses in ranks(REOPEN, 3, tmp_path):
        assert losses == expected
    alone = build(run, world)
    assert checkpoint.load(alone, tmp_path / "two/step_00000003") == 3
    assert train(alone, 3, 6) == expected


def _batch(step):
    tokens = torch.randint(0, 67, (12, 17), generator=torch.Generator().manual_seed(step))
    return [(tokens[:, :-1], tokens[:, 1:])]
