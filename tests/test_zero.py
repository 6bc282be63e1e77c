"""ZeRO: serial losses at every stage, predicted memory and traffic, DeepSpeed's own files."""

import json

import pytest
import torch

from aiscale import checkpoint, cost
from aiscale.config import Run
from aiscale.model.build import build_model
from aiscale.parallel.zero import deepspeed_config
from ranks import TRAINING, aiscale, run_ranks

TINY = ["model.n_layer=2", "model.n_head=2", "model.d_model=32", "model.vocab_size=67", "model.max_seq_len=16"]
TINY += ["loop.seq_len=16", "loop.global_batch=8", "loop.device=cpu", "optimizer.clip_norm=0.9"]
ZERO = [*TINY, "parallel.strategy=zero"]

SETUP = f"""{TRAINING}
from aiscale.checkpoint import integrity
base = Run().override(*{ZERO!r})
def make(*settings):
    return build(base.override(*settings), world)
"""


def ranks(code: str, n: int, tmp_path, **options):
    return run_ranks(SETUP + code, n, tmp_path, strategy="zero", **options)


EQUAL = """
for settings in CASES:
    engine = make(*settings)
    off, buffers = differences(engine, 2), held_bytes(engine.tensors())["buffers"]
    say(json.dumps([settings, off, buffers, engine.config["zero_optimization"]["reduce_bucket_size"]]))
    engine.close()
"""


@pytest.mark.extended
def test_its_buffer_is_one_bucket_and_nothing_is_printed(tmp_path):
    done = ranks(EQUAL.replace("CASES", repr([["parallel.zero_stage=3"]])), 2, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 2 and done.stderr == ""  # DeepSpeed prints pages by default
    for settings, off, buffers, bucket in lines:
        assert off["loss"] < 1e-4 and off["norm"] < 1e-4 and off["weights"] < 5e-4, (settings, off)
        assert buffers == 4 * bucket


RESUME = """
def refusal(engine, path):
    try:
        checkpoint.load(engine, path)
    except checkpoint.CheckpointError as error:
        return str(error).replace(str(path), "PATH")
for settings in CASES:
    name = settings[-1][-1]
    engine = make(*settings)
    train(engine, 0, 3, 2)
    path = checkpoint.save(engine, Path(name), step=3)
    weights = engine.state(full=True)
    straight = train(engine, 3, 6, 2)
    engine.close()
    engine = make(*settings)
    resumed = train(engine, checkpoint.load(engine, path), 6, 2)
    same = [(a.loss, a.grad_norm) == (b.loss, b.grad_norm) for a, b in zip(straight, resumed)]
    say(json.dumps([name, same, [outcome.loss for outcome in straight]]))
    if world.rank == 0:
        torch.save(weights, f"{name}.pt")
    engine.close()
engine = make("parallel.zero_stage=2")
messages = [refusal(engine, Path("3/step_00000003"))]
note = Path("1/step_00000003/aiscale.json")
changed = json.loads(note.read_text()) | {"world_size": 4}
world.barrier()
world.from_rank0(lambda: note.write_text(json.dumps(integrity.seal(changed))))
messages.append(refusal(engine, note.parent))
engine.close()
say(json.dumps(["refused", messages, []]))
"""


def test_a_checkpoint_resumes_exactly_is_read_without_ranks_and_refused_if_it_does_not_fit(tmp_path):
    cases = [
        ["loop.precision=bf16", "parallel.zero_stage=0"],
        ["loop.precision=bf16", "parallel.zero_stage=1"],
        ["loop.precision=fp32", "parallel.zero_stage=2"],
        ["loop.precision=bf16", "parallel.zero_stage=3"],
    ]
    done = ranks(RESUME.replace("CASES", repr(cases)), 2, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [same for name, same, _ in lines if name != "refused"] == [[True, True, True]] * 8
    losses = {name: losses for name, _, losses in lines}
    a, b = (torch.cat([w.flatten() for w in torch.load(tmp_path / f"{stage}.pt").values()]) for stage in "01")
    assert losses["0"] == pytest.approx(losses["1"], abs=5e-4) and (a - b).norm() < 4e-3 * b.norm()  # both in bf16
    model = build_model(Run().override(*TINY).model).state_dict()
    for stage in "0123":
        checkpoint.load_weights(model, tmp_path / stage / "step_00000003")
        written = torch.load(tmp_path / f"{stage}.pt")
        assert all(torch.equal(model[name], written[name]) for name in model | written), stage
    assert [text for name, text, _ in lines if name == "refused"] == [
        [
            "PATH was written by 2 ranks at ZeRO stage 3, but this job has 2 at stage 2, and DeepSpeed resumes only "
            "the same: start 2 with parallel.zero_stage=3",
            "PATH was written by 4 ranks at ZeRO stage 1, but this job has 2 at stage 2, and DeepSpeed resumes only "
            "the same: start 4 with parallel.zero_stage=1",
        ]
    ] * 2


def test_the_deepspeed_configuration_is_valid_and_matches_the_run():
    run = Run().override(*ZERO, "parallel.zero_stage=3", "loop.precision=bf16")
    run = run.override("loop.micro_batch=1")
    config = deepspeed_config(run, 4)
    assert config["train_batch_size"] == 8 == 4 * config["gradient_accumulation_steps"]
    assert config["gradient_clipping"] == 0.9 and config["bf16"] == {"enabled": True}
    zero = config["zero_optimization"]
    assert zero["stage"] == 3
    block = sum(cost.layer_parameters(run.model).values())
    assert zero["reduce_bucket_size"] == block + block % 2
    large = run.override("model.d_model=12288", "model.n_head=96", "model.n_layer=96")
    assert deepspeed_config(large, 4)["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    assert "bf16" not in deepspeed_config(run.override("loop.precision=fp32"), 4)


@pytest.mark.extended
def test_a_run_writes_deepspeeds_configuration_beside_its_own_and_resumes(tmp_path):
    settings = [
        word
        for pair in (*ZERO, "parallel.zero_stage=3", "loop.eval_batches=1", "loop.steps=2")
        for word in ("--set", pair)
    ]
    command = ["train", "--recipe", "laptop", "--nproc", "2", "--quiet", "--set", "name=z"]
    vocabulary = ["--set", "model.vocab_size=256"]
    first = aiscale(*command, *settings, *vocabulary, cwd=tmp_path)
    assert first.returncode == 0 and first.stderr == "", first.stderr
    more = aiscale(*command, *settings, *vocabulary, "--set", "loop.steps=3", "--resume", cwd=tmp_path)
    assert more.returncode == 0 and more.stderr == "", more.stderr
    written = json.loads((tmp_path / "runs/z/ds_config.json").read_text())
    assert written["zero_optimization"]["stage"] == 3
    text = aiscale("generate", "runs/z", "--tokens", "5", cwd=tmp_path)
    assert text.returncode == 0, text.stderr
