"""Data parallelism by DDP and MPI: what `aiscale verify` and the byte table do not cover."""

import json

from ranks import TRAINING, run_ranks

SETUP = (
    TRAINING
    + """
def make(*settings):
    return build(Run().override("model.n_layer=2", "model.n_head=2", "model.d_model=32", "loop.precision=fp64",
        "loop.device=cpu", "loop.global_batch=4", "loop.seq_len=16", "parallel.strategy=ddp", *settings), world)
"""
)


def ranks(code: str, tmp_path) -> list:
    done = run_ranks(SETUP + code, 2, tmp_path)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_small_buckets_send_the_same_bytes_in_more_messages(tmp_path):
    code = """
engine = make("parallel.bucket_mb=0.02")
train(engine, 0, 2, 2)  # the first step rebuilds the buckets
before = world.traffic.snapshot()
train(engine, 2, 3, 2)
((op, _), count), = world.traffic.since(before).items()
say(json.dumps([op, count.calls, count.payload_bytes / sum(p.nbytes for p in engine.model.parameters())]))
"""
    for op, calls, payload in ranks(code, tmp_path):
        assert op == "all_reduce" and calls > 2 and payload == 1


def test_gradients_sent_as_bf16_are_close_to_fp32(tmp_path):
    code = """
found = []
for settings in ((), ("compression.wire=bf16",)):
    engine = make(*settings)
    train(engine, 0, 1)
    found.append(torch.cat([p.grad.reshape(-1) for p in engine.model.parameters()]))
say(json.dumps(((found[1] - found[0]).norm() / found[0].norm()).item()))
"""
    assert all(1e-6 < error < 2**-7 for error in ranks(code, tmp_path))
