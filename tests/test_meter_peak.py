"""Peak memory of a step: exact on the CPU, and between lower and upper bounds from the formulas."""

import json

import pytest

from aiscale import cost
from aiscale.config import Run
from aiscale.distributed import connect
from aiscale.distributed.counter import Group
from aiscale.meter import Meter, step_peak_bytes
from aiscale.parallel import build
from aiscale.train import fit, read_metrics
from ranks import run_ranks

SETTINGS = ("model.n_layer=4", "model.d_model=64", "model.max_seq_len=64", "loop.seq_len=64", "loop.device=cpu")


def test_a_step_reports_the_bytes_of_all_groups_that_call_the_same_collective():
    world = connect("cpu")
    meter = Meter(world, flops_per_token=1.0, precision="fp32")
    with meter.step():
        for name, nbytes in (("tp", 64), ("dp", 1000)):
            world.traffic.add("all_reduce", Group(name, (0, 1)), nbytes)
    world.close()
    told = meter.record(tokens=1)
    assert told["payload_bytes"] == {"all_reduce": 1064} and told["wire_bytes"] == 1064


def test_a_serial_steps_peak_lies_between_activations_and_activations_with_gradients():
    import torch

    run = Run().override(*SETTINGS)
    engine = build(run, connect("cpu"))
    tokens = torch.randint(0, 256, (8, 65))
    batch = [(tokens[:, :-1], tokens[:, 1:])]
    engine.step(batch, 1e-3)
    peak = step_peak_bytes(lambda: engine.step(batch, 1e-3), engine.tensors, torch.device("cpu"))
    states, kept = cost.model_state_bytes(run.model), cost.activation_bytes(run.model, 8, 64)
    assert peak["parameters"] == states["parameters"]
    assert peak["optimizer states"] == states["optimizer states"]
    assert kept < peak["within the step"] < 1.2 * (kept + states["gradients"])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_peak_memory_of_a_sharded_step_includes_the_predicted_states(strategy, tmp_path):
    code = f"""
    from aiscale.config import Run
    from aiscale.meter import step_peak_bytes
    from aiscale.parallel import build
    run = Run().override(*{SETTINGS!r}, "parallel.strategy={strategy}")
    engine = build(run, world)
    tokens = torch.randint(0, 256, (1, 65))
    batch = [(tokens[:, :-1], tokens[:, 1:])]
    for _ in range(2):
        engine.step(batch, 1e-3)
    peak = step_peak_bytes(lambda: engine.step(batch, 1e-3), engine.tensors, world.device)
    if world.is_main:
        import json
        say(json.dumps(peak))
    """
    done = run_ranks(code, 2, tmp_path)
    assert done.returncode == 0, done.stderr
    peak = json.loads(done.stdout)
    run = Run().override(*SETTINGS, f"parallel.strategy={strategy}")
    held = cost.held_bytes(run, 2)
    assert {name: peak[name] for name in ("parameters", "optimizer states")} == {
        name: held[name] for name in ("parameters", "optimizer states")
    }
    assert peak["within the step"] > held["gradients"]


def test_every_rank_reports_bytes_sent_and_held(tmp_path):
    fit(Run().override(*SETTINGS, "loop.steps=2", "loop.global_batch=2"), runs_dir=tmp_path, progress=False)
    (report,) = read_metrics(tmp_path / "run", "rank")
    states = cost.model_state_bytes(Run().override(*SETTINGS).model)
    assert (report["rank"], report["step"], report["traffic"]) == (0, 2, [])
    assert {name: report["held_bytes"][name] for name in states if name != "weight casts"} == {
        name: nbytes for name, nbytes in states.items() if name != "weight casts"
    }
