"""ZeRO: serial's numbers at every stage, the memory and the traffic that each stage promises, DeepSpeed's own files."""

import json
from math import ceil

import pytest
import torch

from aiscale import checkpoint, cost
from aiscale.config import ConfigError, Run
from aiscale.distributed import connect
from aiscale.model.build import build_model
from aiscale.optim import parameter_groups
from aiscale.parallel import build
from aiscale.parallel.zero import deepspeed_config
from ranks import aiscale, run_ranks

TINY = ["model.n_layer=2", "model.n_head=2", "model.d_model=32", "model.vocab_size=67", "model.max_seq_len=16"]
TINY += ["loop.seq_len=16", "loop.global_batch=8", "loop.device=cpu", "optimizer.clip_norm=0.9"]
ZERO = [*TINY, "parallel.strategy=zero"]

SETUP = f"""
import dataclasses, json
from pathlib import Path
from aiscale import checkpoint
from aiscale.checkpoint import integrity
from aiscale.config import ParallelConfig, Run
from aiscale.distributed import Traffic, World
from aiscale.meter import held_bytes, payload_bytes
from aiscale.parallel import build
base = Run().override(*{ZERO!r})
def make(*settings):
    return build(base.override(*settings), world)
def share(step, rank, size, n_micro=1):
    tokens = torch.randint(0, 67, (8, 17), generator=torch.Generator().manual_seed(step))
    mine = tokens[rank * 8 // size : (rank + 1) * 8 // size]
    return [(part[:, :-1], part[:, 1:]) for part in mine.chunk(n_micro)]
def train(engine, first, last, n_micro=1):
    return [engine.step(share(s, world.rank, world.size, n_micro), lr=1e-3 / (s + 1)) for s in range(first, last)]
"""


def ranks(code: str, n: int, tmp_path, **options):
    return run_ranks(SETUP + code, n, tmp_path, strategy="zero", **options)


EQUAL = """
alone = World(rank=0, size=1, local_rank=0, local_size=1, device=world.device, launcher="none", backend="gloo",
              traffic=Traffic())
serial = build(dataclasses.replace(base, parallel=ParallelConfig()), alone)
expected = [serial.step(share(s, 0, 1), lr=1e-3 / (s + 1)) for s in range(12)]
for settings, n_micro in CASES:
    engine = make(*settings)
    found = train(engine, 0, 6, n_micro)
    before = engine.evaluate(share(99, world.rank, world.size))  # must not disturb what follows
    found += train(engine, 6, 12, n_micro)
    loss = max(abs(a.loss - b.loss) for a, b in zip(found, expected))
    norm = max(abs(a.grad_norm - b.grad_norm) for a, b in zip(found, expected))
    weights, theirs = engine.state(full=True), serial.state(full=True)
    off = max((weights[name] - theirs[name]).abs().max().item() for name in theirs)
    same = weights.keys() == theirs.keys() and found[0].tokens == expected[0].tokens
    say(f"{world.rank}: {settings} {n_micro}", loss < 1e-5, norm < 1e-5, off < 5e-5, same)
    engine.close()
"""
STAGES = [[f"parallel.zero_stage={stage}"] for stage in range(4)]
OFFLOADED = [
    ["parallel.zero_stage=1", "parallel.offload=optimizer"],
    ["parallel.zero_stage=3", "parallel.offload=all"],
]


def test_every_stage_gives_serials_losses_norms_and_weights(tmp_path):
    cases = [(settings, 2) for settings in STAGES] + [(settings, 2) for settings in OFFLOADED]
    done = ranks(EQUAL.replace("CASES", repr(cases)), 2, tmp_path)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(lines) == 2 * len(cases) and all(line.endswith("True True True True") for line in lines), lines
    assert done.stderr == ""  # DeepSpeed prints pages unless it is told not to


def test_four_ranks_give_serials_losses_norms_and_weights(tmp_path):
    cases = [(["parallel.zero_stage=2"], 1), (["parallel.zero_stage=3", "parallel.offload=optimizer"], 2)]
    done = ranks(EQUAL.replace("CASES", repr(cases)), 4, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 4 * len(cases) and all(line.endswith("True True True True") for line in lines), lines


MEASURE = """
for stage in range(4):
    engine = make(f"parallel.zero_stage={stage}", "loop.precision=PRECISION", "loop.global_batch=GLOBAL_BATCH")
    train(engine, 0, 1, 2)
    before = world.traffic.snapshot()
    train(engine, 1, 2, 2)
    sent = payload_bytes(world.traffic.since(before))
    if world.rank == 0:
        bucket = engine.config["zero_optimization"]["reduce_bucket_size"]
        say(json.dumps([stage, sent, held_bytes(engine.held()), bucket]))
    engine.close()
"""


def expected_bytes(stage: int, n: int, width: int, n_micro: int, bucket: int) -> tuple[dict, dict]:
    """What DeepSpeed sends in a step and what rank 0 holds, for `width` bytes a parameter on n ranks."""
    model = build_model(Run().override(*TINY).model)
    tensors = [p.numel() for p in model.parameters()]
    groups = [[p.numel() for p in group["params"]] for group in parameter_groups(model, 0.1)]
    padded = sum(2 * n * ceil(sum(group) / (2 * n)) for group in groups)  # stages 1, 2: each group to 2 n elements
    share = sum(ceil(count / n) for count in tensors)  # stage 3: each tensor to n
    whole = width * sum(tensors)
    overlapping = 0  # stage 2: a tensor that the cut goes through is kept whole
    for group in groups:
        cut, start = 2 * ceil(sum(group) / (2 * n)), 0
        for count in group:
            overlapping += count if start < cut else 0
            start += count
    sent = {
        0: {"all_reduce": whole},
        1: {"all_reduce": whole, "all_gather": width * padded},
        2: {"all_reduce": whole * n_micro, "all_gather": width * padded},
        3: {"all_gather": 2 * n_micro * width * n * share, "reduce_scatter": n_micro * width * n * share},
    }[stage]
    states = {
        0: (8 if width == 4 else 12) * sum(tensors) + 4 * len(tensors),
        3: 12 * share + 4 * len(groups),
    }.get(stage, 12 * padded // n + 4 * len(groups))
    held = {
        "parameters": {0: whole, 3: width * share}.get(stage, width * padded),
        "gradients": {0: whole, 1: whole, 2: width * overlapping, 3: width * share}[stage],
        "optimizer states": states,
        "buffers": width * bucket if stage == 3 else 0,
    }
    return sent, held


@pytest.mark.parametrize(("n", "precision", "width"), [(2, "fp32", 4), (3, "bf16", 2)])
def test_each_stage_sends_and_holds_what_its_formula_says(n, precision, width, tmp_path):
    done = ranks(MEASURE.replace("PRECISION", precision).replace("GLOBAL_BATCH", str(8 * n)), n, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    for line in done.stdout.splitlines():
        stage, sent, held, bucket = json.loads(line)
        expected_sent, expected_held = expected_bytes(stage, n, width, 2, bucket)
        assert sent.keys() >= expected_sent.keys(), (stage, sent)
        for op, nbytes in sent.items():  # norms and overflow flags travel too, a few bytes each
            assert 0 <= nbytes - expected_sent.get(op, 0) <= 24, (stage, op, sent, expected_sent)
        assert held == expected_held, (stage, held, expected_held)


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
    say(json.dumps([name, same]))
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
engine = make("parallel.zero_stage=3", "loop.precision=bf16")
shard = Path("3/step_00000003/deepspeed/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
world.from_rank0(lambda: os.truncate(shard, shard.stat().st_size // 2))
messages.append(refusal(engine, Path("3/step_00000003")))
say(json.dumps(["refused", messages]))
engine.close()
"""


def test_a_checkpoint_resumes_exactly_is_read_without_ranks_and_refused_where_it_does_not_fit(tmp_path):
    cases = [
        ["loop.precision=bf16", "parallel.zero_stage=0"],
        ["parallel.zero_stage=1"],
        ["parallel.offload=optimizer", "parallel.zero_stage=2"],
        ["loop.precision=bf16", "parallel.zero_stage=3"],
    ]
    done = ranks(RESUME.replace("CASES", repr(cases)), 2, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [same for name, same in lines if name != "refused"] == [[True, True, True]] * 8
    model = build_model(Run().override(*TINY).model).state_dict()
    for stage in "0123":
        if stage != "3":  # its shard has been cut short by now
            checkpoint.load_weights(model, tmp_path / stage / "step_00000003")
            written = torch.load(tmp_path / f"{stage}.pt")
            assert all(torch.equal(model[name], written[name]) for name in model | written), stage
    assert [text for name, text in lines if name == "refused"] == [
        [
            "PATH was written by 2 ranks at ZeRO stage 3, but this job has 2 at stage 2, and DeepSpeed resumes only "
            "the same: start 2 with parallel.zero_stage=3",
            "PATH was written by 4 ranks at ZeRO stage 1, but this job has 2 at stage 2, and DeepSpeed resumes only "
            "the same: start 4 with parallel.zero_stage=1",
            "cannot read PATH (bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt is cut short): delete it to resume from "
            "the one before",
        ]
    ] * 2


def test_fp64_is_refused_because_it_would_be_fp32():
    with pytest.raises(ConfigError, match="DeepSpeed keeps its masters and sends gradients in fp32"):
        build(Run().override(*ZERO, "loop.precision=fp64"), connect("cpu"))


def test_the_configuration_is_deepspeeds_and_of_the_runs_size():
    run = Run().override(*ZERO, "parallel.zero_stage=3", "parallel.offload=all", "loop.precision=bf16")
    run = run.override("loop.micro_batch=1")
    config = deepspeed_config(run, 4)
    assert config["train_batch_size"] == 8 == 4 * config["gradient_accumulation_steps"]
    assert config["gradient_clipping"] == 0.9 and config["bf16"] == {"enabled": True}
    zero = config["zero_optimization"]
    assert zero["stage"] == 3 and zero["offload_param"]["device"] == zero["offload_optimizer"]["device"] == "cpu"
    block = sum(cost.layer_parameters(run.model).values())
    assert zero["reduce_bucket_size"] == block + block % 2
    large = run.override("model.d_model=12288", "model.n_head=96", "model.n_layer=96")
    assert deepspeed_config(large, 4)["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    assert "bf16" not in deepspeed_config(run.override("loop.precision=fp32", "parallel.offload=none"), 4)


def test_a_run_writes_deepspeeds_configuration_beside_its_own_and_resumes(tmp_path):
    settings = [
        word
        for pair in (*ZERO, "parallel.zero_stage=3", "loop.eval_batches=1", "loop.steps=2")
        for word in ("--set", pair)
    ]
    command = ["train", "--recipe", "laptop", "--nproc", "2", "--quiet", "--set", "name=z"]
    vocabulary = ["--set", "model.vocab_size=256"]
    first = aiscale(*command, *settings, *vocabulary, cwd=tmp_path, strategy="zero")
    assert first.returncode == 0 and first.stderr == "", first.stderr
    more = aiscale(*command, *settings, *vocabulary, "--set", "loop.steps=3", "--resume", cwd=tmp_path, strategy="zero")
    assert more.returncode == 0 and more.stderr == "", more.stderr
    written = json.loads((tmp_path / "runs/z/ds_config.json").read_text())
    assert written["zero_optimization"]["stage"] == 3
    text = aiscale("generate", "runs/z", "--tokens", "5", cwd=tmp_path)
    assert text.returncode == 0, text.stderr
