"""ZeRO-1 under DDP: the same training with optimizer states sharded over ranks, with and without Radius."""

import pytest

from ranks import run_ranks

SETUP = """
import tempfile
from aiscale import checkpoint
from aiscale.config import Run
from aiscale.meter import held_bytes
from aiscale.parallel import build
ZERO1 = "parallel.distributed_optimizer=true"
BASE = Run().override("model.n_layer=2", "model.n_head=2", "model.d_model=32", "model.vocab_size=67",
    "loop.precision=fp64", "loop.device=cpu", "loop.seq_len=16", "loop.global_batch=12", "parallel.strategy=ddp")
def share(step):  # this rank's part of a global batch of 12
    tokens = torch.randint(0, 67, (12, 17), generator=torch.Generator().manual_seed(step))
    mine = tokens.chunk(world.size)[world.rank]
    return [(mine[:, :-1], mine[:, 1:])]
def train(engine, first, last, folder=None):
    for step in range(first, last):
        engine.step(share(step), lr=1e-2)
        if folder:
            checkpoint.save(engine, folder, step=step + 1, keep=9)
    return torch.cat([p.detach().reshape(-1) for p in engine.model.parameters()])
"""


def ranks(code: str, n: int, folder) -> None:
    done = run_ranks(SETUP + code + "\nsay('done')", n, folder)
    assert done.returncode == 0 and done.stdout.split() == ["done"] * n, done.stderr


def test_sharded_states_train_bit_equal_weights_with_a_share_of_the_memory(tmp_path):
    code = """
ways = [(), ("optimizer.name=sgd",), ("compression.method=top-k", "compression.density=0.1")]
for settings in ways:
    whole, divided = (build(BASE.override(*settings, *zero1), world) for zero1 in ((), (ZERO1,)))
    assert torch.equal(train(whole, 0, 5), train(divided, 0, 5)), settings
    nbytes, share_of_it = (held_bytes(e.tensors())["optimizer states"] for e in (whole, divided))
    assert sum(world.gather(share_of_it)) == nbytes and share_of_it < nbytes / 2, settings
    whole.close(), divided.close()
"""
    ranks(code, 3, tmp_path)


@pytest.mark.extended
def test_a_checkpoint_of_sharded_states_resumes_bit_for_bit_sharded_and_unsharded(tmp_path):
    code = f"""
for settings in ((), ("compression.method=top-k", "compression.density=0.3")):
    folder = "{tmp_path}/" + str(len(settings))
    engine = build(BASE.override(ZERO1, *settings), world)
    straight = train(engine, 0, 5, folder)
    engine.close()
    for stopped in (1, 3):
        for zero1 in ((), (ZERO1,)):
            engine = build(BASE.override(*settings, *zero1), world)
            checkpoint.load(engine, f"{{folder}}/step_{{stopped:08d}}")
            assert torch.equal(train(engine, stopped, 5), straight), (settings, stopped, zero1)
            engine.close()
engine = build(BASE, world)  # and the other way: written whole
straight = train(engine, 0, 5, "{tmp_path}/whole")
engine = build(BASE.override(ZERO1), world)
checkpoint.load(engine, "{tmp_path}/whole/step_00000002")
assert torch.equal(train(engine, 2, 5), straight)
if world.is_main:
    torch.save(straight, "{tmp_path}/straight")
"""
    ranks(code, 2, tmp_path)
    code = f"""
engine = build(BASE.override(ZERO1), world)
checkpoint.load(engine, "{tmp_path}/0/step_00000003")
assert (train(engine, 3, 5) - torch.load("{tmp_path}/straight")).abs().max() < 1e-12
"""
    ranks(code, 3, tmp_path)  # more ranks than wrote it
