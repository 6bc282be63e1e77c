"""Data parallelism: equal gradients, the bytes that it must send, and no more."""

import pytest

from aiscale.config import ConfigError, Run
from aiscale.distributed import connect
from aiscale.parallel import build
from ranks import run_ranks

SETUP = """
import dataclasses
from aiscale.config import CompressionConfig, ParallelConfig, Run
from aiscale.parallel import build
run = Run().override("model.n_layer=2", "model.n_head=2", "model.d_model=32", "loop.precision=fp64",
                     "loop.device=cpu", "optimizer.clip_norm=0", *SETTINGS)
torch.manual_seed(5)
tokens = torch.randint(0, 256, (4, 17))
x, y = tokens[:, :-1], tokens[:, 1:]
def share(rank, size, n_micro=1):
    mine = slice(rank * 4 // size, (rank + 1) * 4 // size)
    return list(zip(x[mine].chunk(n_micro), y[mine].chunk(n_micro)))
def gradients(engine):
    return torch.cat([p.grad.reshape(-1) for p in engine.model.parameters()])
def serial_gradients():
    from aiscale.distributed import World, Traffic
    alone = World(rank=0, size=1, local_rank=0, local_size=1, device=world.device, launcher="none", backend="gloo",
                  traffic=Traffic())
    engine = build(dataclasses.replace(run, parallel=ParallelConfig(), compression=CompressionConfig()), alone)
    result = engine.step(share(0, 1), lr=0.0)
    return gradients(engine), result
"""


def ranks(code: str, n: int, tmp_path, *settings: str, launcher: str = "forked") -> list[str]:
    done = run_ranks(SETUP.replace("SETTINGS", repr(settings)) + code, n, tmp_path, launcher=launcher)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


EQUAL = """
expected, alone = serial_gradients()
engine = build(run, world)
result = engine.step(share(world.rank, world.size, N_MICRO), lr=0.0)
difference = (gradients(engine) - expected).abs().max().item()
say(difference < 1e-15, abs(result.loss - alone.loss) < 1e-14, result.tokens == alone.tokens,
    abs(result.grad_norm - alone.grad_norm) < 1e-12)
"""


@pytest.mark.parametrize(("n", "n_micro"), [(2, 1), (2, 2), (4, 1)])
def test_ddp_gives_the_gradients_of_the_whole_batch(n, n_micro, tmp_path):
    lines = ranks(EQUAL.replace("N_MICRO", str(n_micro)), n, tmp_path, "parallel.strategy=ddp")
    assert lines == ["True True True True"] * n


@pytest.mark.parametrize("setting", ["parallel.static_graph=true", "parallel.gradient_as_bucket_view=false"])
def test_ddps_options_do_not_change_the_gradients(setting, tmp_path):
    lines = ranks(EQUAL.replace("N_MICRO", "2"), 2, tmp_path, "parallel.strategy=ddp", setting)
    assert lines == ["True True True True"] * 2


def test_mpi_gives_the_gradients_of_the_whole_batch(tmp_path):
    lines = ranks(EQUAL.replace("N_MICRO", "2"), 2, tmp_path, "parallel.strategy=mpi", launcher="mpiexec")
    assert lines == ["True True True True"] * 2


TRAFFIC = """
engine = build(run, world)
for _ in range(3):  # the first step rebuilds the buckets
    before = world.traffic.snapshot()
    engine.step(share(world.rank, world.size, 2), lr=0.0)
counts = world.traffic.since(before)
size = sum(p.nbytes for p in engine.model.parameters())
say(*((op, c.calls, c.payload_bytes / size) for (op, _), c in counts.items()))
"""


@pytest.mark.parametrize(
    ("settings", "launcher", "expected"),
    [
        (("parallel.strategy=ddp",), "forked", "('all_reduce', 1, 1.0)"),
        (
            ("parallel.strategy=ddp", "compression.wire=bf16", "loop.precision=fp32"),
            "forked",
            "('all_reduce', 1, 0.5)",
        ),
        (("parallel.strategy=mpi",), "mpiexec", "('all_reduce', 1, 1.0)"),
    ],
)
def test_one_step_sends_every_gradient_once_however_many_micro_batches(settings, launcher, expected, tmp_path):
    assert ranks(TRAFFIC, 2, tmp_path, *settings, launcher=launcher) == [expected] * 2


def test_small_buckets_send_the_same_bytes_in_more_messages(tmp_path):
    (line, _) = ranks(TRAFFIC, 2, tmp_path, "parallel.strategy=ddp", "parallel.bucket_mb=0.02")
    op, calls, payload = eval(line)
    assert op == "all_reduce" and calls > 2 and payload == 1.0


def test_gradients_sent_as_bf16_are_close_to_those_sent_whole(tmp_path):
    code = """
expected, _ = serial_gradients()
engine = build(run, world)
engine.step(share(world.rank, world.size), lr=0.0)
error = (gradients(engine) - expected).norm() / expected.norm()
say(1e-6 < error.item() < 2**-7)
"""
    assert ranks(code, 2, tmp_path, "parallel.strategy=ddp", "compression.wire=bf16") == ["True"] * 2


def test_mpi_is_refused_where_mpi_did_not_start_the_ranks():
    with pytest.raises(
        ConfigError, match="parallel.strategy mpi needs ranks that MPI started, but these came from none"
    ):
        build(Run().override("parallel.strategy=mpi"), connect("cpu"))


def test_the_trace_of_a_ddp_step_sees_its_all_reduces(tmp_path):
    code = """
from aiscale.parallel.trace import StepTrace
engine = build(run, world)
trace = StepTrace(engine.module)
trace.start()
engine.step(share(world.rank, world.size), lr=0.0)
say(*{(event.kind, event.name.partition(" ")[0]) for event in trace.stop()})
"""
    assert ranks(code, 2, tmp_path, "parallel.strategy=ddp") == ["('communication', 'all-reduce')"] * 2
