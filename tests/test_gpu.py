"""GPUs: every strategy on CUDA, alone and sharing one card over gloo. The last tests need no GPU: they compare what
makes sharing possible (messages staged through host memory) with the serial result on a CPU.
"""

import json

import pytest
import torch

from aiscale.distributed import ConnectError, Launch
from aiscale.distributed.connect import pick_device
from aiscale.recipes import recipe
from aiscale.train import fit
from ranks import run_ranks, script

SHORT = ("model.n_layer=4", "model.n_head=4", "model.d_model=64", "model.position=learned")
SHORT += ("loop.steps=4", "loop.global_batch=8", "loop.seq_len=32", "loop.eval_every=0", "loop.eval_batches=1")

#: strategy -> (settings, ranks that share the card)
STRATEGIES = {
    "ddp": (("parallel.strategy=ddp",), 2),
    "zero0": (("parallel.strategy=zero", "parallel.zero_stage=0"), 2),
    "zero1": (("parallel.strategy=zero", "parallel.zero_stage=1"), 2),
    "zero2": (("parallel.strategy=zero", "parallel.zero_stage=2"), 2),
    "zero3": (("parallel.strategy=zero", "parallel.zero_stage=3"), 2),
    "fsdp": (("parallel.strategy=fsdp",), 2),
    "tp2": (("parallel.strategy=megatron", "parallel.tp=2"), 2),
    "tp2 x pp2": (("parallel.strategy=megatron", "parallel.tp=2", "parallel.pp=2", "loop.micro_batch=2"), 4),
    "pipeline": (("parallel.strategy=pipeline", "parallel.pp=2", "loop.micro_batch=2"), 2),
}

COMPRESSED = {
    "radius": ("density=0.4", "interval=2", "bucket_mb=0.1"),
    "radius at once": ("density=0.4", "interval=2", "overlap=false", "bucket_mb=0.1"),
    "top-k": ("density=0.1",),
    "powersgd": (),
}

TRAIN = """
from aiscale.recipes import recipe
from aiscale.train import fit
result = fit(recipe("laptop").override(*SETTINGS), world, runs_dir="runs", progress=False)
if world.is_main:
    say(result.losses)
"""


def losses_of(settings, n: int, folder, connect: str) -> list[float]:
    """The losses of `n` ranks; `connect` replaces the plain connect() of ranks.HEADER."""
    code = f"world.close()\n{connect}\n" + TRAIN.replace("SETTINGS", repr((*SHORT, *settings)))
    launcher = "forked" if "loop.device=cpu" in settings else "aiscale"
    done = run_ranks(code, n, folder, launcher=launcher)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def serial_losses(folder, *settings: str) -> list[float]:
    return fit(recipe("laptop").override(*SHORT, *settings), runs_dir=folder / "serial", progress=False).losses


# With a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_a_gpu_gives_the_losses_of_the_cpu(precision, tmp_path):
    on_cpu = serial_losses(tmp_path, "loop.device=cpu")
    run = recipe("laptop").override(*SHORT, "loop.device=cuda", f"loop.precision={precision}")
    result = fit(run, runs_dir=tmp_path, progress=False)
    assert result.losses == pytest.approx(on_cpu, abs=1e-4 if precision == "fp32" else 2e-2)
    assert result.summary["peak_memory_bytes"] == torch.cuda.max_memory_allocated()


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_runs_on_a_gpu_with_one_rank(strategy, tmp_path):
    settings = [s for s in STRATEGIES[strategy][0] if not s.startswith(("parallel.tp", "parallel.pp"))]
    found = losses_of((*settings, "loop.device=cuda"), 1, tmp_path, 'world = connect("cuda")')
    assert found == pytest.approx(serial_losses(tmp_path, "loop.device=cuda"), abs=2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_share_one_gpu_over_gloo(strategy, tmp_path):
    settings, n = STRATEGIES[strategy]
    shared = 'world = connect("cuda", backend="gloo")'
    found = losses_of((*settings, "loop.device=cuda", "loop.backend=gloo"), n, tmp_path, shared)
    assert found == pytest.approx(serial_losses(tmp_path, "loop.device=cuda"), abs=2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("way", COMPRESSED)
@pytest.mark.parametrize("n", [1, 2])
def test_compressed_gradients_on_a_gpu_are_those_on_the_cpu(n, way, tmp_path):
    for folder in ("cpu", "gpu"):
        (tmp_path / folder).mkdir()
    words = (f"method={way.split()[0]}", *COMPRESSED[way])
    sections = ("parallel" if word.startswith("bucket") else "compression" for word in words)
    settings = ("parallel.strategy=ddp", *(f"{section}.{word}" for section, word in zip(sections, words, strict=True)))
    on_cpu = losses_of((*settings, "loop.device=cpu"), n, tmp_path / "cpu", 'world = connect("cpu")')
    # One rank uses NCCL, which hands hooks its results on a stream of its own; two on one card need gloo.
    cuda = 'world = connect("cuda")' if n == 1 else 'world = connect("cuda", backend="gloo")'
    backend = ("loop.device=cuda",) if n == 1 else ("loop.device=cuda", "loop.backend=gloo")
    assert losses_of((*settings, *backend), n, tmp_path / "gpu", cuda) == pytest.approx(on_cpu, abs=2e-4)


@pytest.mark.gpu
def test_a_compiled_model_trains_the_same_and_its_checkpoint_has_plain_names(tmp_path):
    plain = serial_losses(tmp_path, "loop.device=cuda")
    run = recipe("laptop").override(*SHORT, "loop.device=cuda", "loop.compile=true", "loop.steps=2")
    first = fit(run, runs_dir=tmp_path, progress=False).losses
    rest = fit(run.override("loop.compile=false", "loop.steps=4"), runs_dir=tmp_path, resume=True, progress=False)
    assert first == pytest.approx(plain[:2], abs=2e-4) and len(rest.losses) == 2


@pytest.mark.gpu
def test_gpt2_355m_reaches_45_percent_of_a_hopper_gpus_peak():
    (row,) = script("gpu").measure(["355M"])["rows"]
    assert row["mfu"] > (0.45 if any(name in row["device"] for name in ("H100", "H200")) else 0.2)


# Without -------------------------------------------------------------------------------------------------------------

STAGED = """
from aiscale.distributed import wire
wire.on_gpu = lambda tensor: True
world = connect("cpu")
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])  # all-reduce; gather and scatter; send and receive
def test_messages_that_pass_through_host_memory_change_no_loss(strategy, tmp_path):
    settings, n = STRATEGIES[strategy]
    found = losses_of((*settings, "loop.device=cpu"), n, tmp_path, STAGED)
    assert found == pytest.approx(serial_losses(tmp_path, "loop.device=cpu"), abs=2e-4)


def test_ranks_share_gpus_only_when_asked_to(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    places = [Launch(launcher="aiscale", rank=r, size=4, local_rank=r, local_size=4) for r in range(4)]
    with pytest.raises(ConnectError, match="4 ranks on this node, but torch sees 2 GPUs: .*set loop.backend=gloo to"):
        pick_device("cuda", places[0])
    assert [pick_device("cuda", place, shared=True).index for place in places] == [0, 1, 0, 1]
    assert pick_device("cpu", places[3], shared=True).type == "cpu"
