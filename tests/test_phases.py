"""The IPU's execution modes on our ranks: serial's gradients, and the bytes that are predicted."""

import json

import pytest
from instruments.phases import order, predicted

from aiscale.train.presets import Shape
from ranks import run_ranks

SHAPE = Shape(layers=4, heads=2, width=32, vocabulary=256, context=16)
CODE = f"""
import json
from aiscale.train.model import GPT, loss_of
from aiscale.train.presets import Shape
from instruments.phases import MODES, execute
shape = {SHAPE!r}
torch.manual_seed(0)
tokens = torch.randint(0, 256, (4, 17))
batches = [(row[None, :-1], row[None, 1:]) for row in tokens]
found = {{}}
for mode in MODES:
    done = execute(shape, world, batches, mode)
    torch.manual_seed(0)
    model = GPT(shape)
    loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    worst = max(
        float((p.grad - done.gradients[name]).abs().max()) for name, p in model.named_parameters()
    )
    found[mode] = [abs(loss.item() - done.loss), worst, done.weight_bytes, done.moved_bytes]
if world.is_main:
    say(json.dumps(found))
"""


@pytest.mark.extended
def test_every_mode_gives_serials_gradients_and_moves_the_predicted_bytes(tmp_path):
    done = run_ranks(CODE, 2, tmp_path)
    assert done.returncode == 0, done.stderr
    for mode, (loss, gradient, weight_bytes, moved_bytes) in json.loads(done.stdout).items():
        assert loss < 1e-5 and gradient < 1e-6, mode
        said = predicted(SHAPE, mode, 2, micro_batches=4, length=16)
        assert (weight_bytes, moved_bytes) == (said["weight_bytes"], said["moved_bytes"]), mode


def test_only_one_rank_works_at_a_time_unless_pipelined():
    assert order("sharded", 0, 2, 2)[:2] == [("forward", 0, 0), ("backward", 0, 0)]
    assert [work.micro_batch for work in order("pipelined", 0, 2, 3)] != [0, 0, 1, 1, 2, 2]
    assert {work.piece for work in order("parallel phased", 1, 4, 2)} == {1, 3}
