"""The trainers of aiscale.train: the lessons' scripts and a diff, alike in what they compute."""

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from aiscale.lesson.scripts import changed
from aiscale.plan import cost
from aiscale.plan.presets import model_of
from aiscale.train import data, options, record
from aiscale.train.layout import misfit
from aiscale.train.model import GPT
from aiscale.train.presets import presets, shape_of
from aiscale.train.record import read_metrics
from centre import Cluster

ROOT = Path(__file__).parents[1]
TRAIN = ROOT / "src/aiscale/train"
OWN = ROOT / "workshop/your_own"
sys.path.insert(0, str(ROOT / "tools"))
import trainer_diffs  # noqa: E402

GROWN = [name for name in trainer_diffs.ORIGINS if (TRAIN / f"{name}.py").exists()]
#: Lines of code that a trainer may add to the learner's script, imports and comments aside.
MOST_ADDED = {"zero": 25, "radius": 40, "megatron": 60}
HELPERS = """layout hugging_face trained job ranks watch data model optimizer options presets record
refusal normal command sharded_checkpoint megatron_checkpoint megatron_layers megatron_model
megatron_weights megatron_names""".split()


def run(trainer, *options, ranks=1, status=0, folder, env=None):
    """(losses by step, standard error) of a trainer on some ranks."""
    command = [sys.executable, "-m", "aiscale", "train", trainer, *map(str, options)]
    if ranks > 1:
        command += ["--nproc", str(ranks)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == status, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if " loss " in line]
    return {int(step): float(loss) for _, step, _, loss in lines}, done.stderr


def losses(folder):
    return [line["loss"] for line in read_metrics(folder)]


# The code ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", GROWN)
def test_a_trainer_is_the_learners_script_and_its_diff(trainer):
    text = (OWN / trainer_diffs.ORIGINS[trainer]).read_text()
    grown = changed(text, (TRAIN / f"{trainer}.diff").read_text())
    assert grown == (TRAIN / f"{trainer}.py").read_text(), "run python tools/trainer_diffs.py"


@pytest.mark.parametrize("trainer", GROWN)
def test_a_trainer_stays_near_the_learners_script(trainer):
    assert len((TRAIN / f"{trainer}.py").read_text().splitlines()) <= 140
    new = [
        line[1:].strip()
        for line in (TRAIN / f"{trainer}.diff").read_text().splitlines()
        if line[:1] == "+"
    ]
    code = [
        line
        for line in new
        if line and not line.startswith(("#", '"""', "import ", "from ", "torchrun", "python"))
    ]
    assert len(code) <= MOST_ADDED.get(trainer, 20), code


@pytest.mark.parametrize("helper", HELPERS)
def test_a_helper_fits_on_a_few_screens(helper):
    assert len((TRAIN / f"{helper}.py").read_text().splitlines()) <= 200


def test_trainers_import_nothing_else_of_ours():
    allowed = {"aiscale.train", "aiscale"}  # and of `aiscale`, what libraries lack without a GPU
    for name in [*GROWN, *HELPERS]:
        if name == "command":
            continue
        for node in ast.walk(ast.parse((TRAIN / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aiscale"):
                assert ".".join(node.module.split(".")[:2]) in allowed, (name, node.module)
                if node.module == "aiscale":
                    assert [each.name for each in node.names] == ["without_gpu"], name


def test_a_step_runs_through_six_files(tmp_path):
    program = """
import sys
sys.argv = ["fsdp", "--steps", "2", "--save", "run"]
from aiscale.train import fsdp, options
seen = {}
def trace(frame, event, argument):
    if "aiscale" in frame.f_code.co_filename:
        seen.setdefault(frame.f_code.co_filename, 0)
sys.setprofile(trace)
follow = fsdp.Job.follow
def only_steps(self, batches):
    seen.clear()
    yield from follow(self, batches)
fsdp.Job.follow = only_steps
fsdp.main(options.options().parse_args())
sys.setprofile(None)
print(*seen)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    files = [file for file in done.stdout.splitlines()[-1].split() if "checkpoint" not in file]
    assert f"{TRAIN}/job.py" in files
    assert len(files) <= 6
    assert sum(len(Path(file).read_text().splitlines()) for file in files) <= 800


def test_every_preset_has_a_source_and_a_whole_shape():
    for name, entries in presets().items():
        assert entries["source"]
        shape = shape_of(name)
        assert shape.width % shape.heads == 0, name


def test_a_model_may_be_a_size_and_the_formulas_know_it(tmp_path):
    run("serial", "--model", "2x32", "--steps", 2, folder=tmp_path)
    assert len(losses(tmp_path / "run")) == 2
    with torch.device("meta"):
        model = GPT(shape_of("3x96"))
    numbers = sum(weight.numel() for weight in model.parameters())
    assert numbers == cost.parameter_count(model_of("3x96"))
    assert (shape_of("3x96").layers, shape_of("3x96").heads) == (3, 3)


# What they compute -------------------------------------------------------------------------------


def test_a_trainer_computes_what_the_learners_script_computes(tmp_path):
    """To the last printed digit: the helpers change nothing. (The learner's decays biases, too.)"""
    for file in OWN.glob("*.py"):
        text = file.read_text().replace("lr=args.lr)", "lr=args.lr, weight_decay=0)")
        (tmp_path / file.name).write_text(text)
    command = [sys.executable, "train.py", "--steps", "4", "--save", "theirs"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    ours, _ = run("serial", "--steps", 4, "--weight-decay", 0, folder=tmp_path)
    assert ours == {int(line.split()[1]): float(line.split()[3]) for line in said.splitlines()}


def equal_to_serial(folder, cases, *, steps=3, within=1e-12, options=("--fp64",)):
    run("serial", "--steps", steps, "--save", "serial", *options, folder=folder)
    expected = losses(folder / "serial")
    assert len(expected) == steps
    for number, (trainer, ranks, *more) in enumerate(cases):
        run(
            trainer, "--steps", steps, "--save", number, *options, *more, ranks=ranks, folder=folder
        )
        assert losses(folder / str(number)) == pytest.approx(expected, rel=0, abs=within), (
            trainer,
            more,
        )


def test_ddp_and_fsdp_equal_serial_in_fp64(tmp_path):
    equal_to_serial(tmp_path, [("ddp", 4), ("fsdp", 4)])


@pytest.mark.extended
def test_every_strategy_equals_serial(tmp_path):
    cases = [
        ("ddp", 2),
        ("tp_pp", 4),
        ("tp_pp", 4, "--tp", 4, "--pp", 1),
        ("tp_pp", 4, "--tp", 1, "--pp", 2),
        ("radius", 4, "--density", 1),
    ]
    equal_to_serial(tmp_path, cases)
    (tmp_path / "zero").mkdir()
    # DeepSpeed sums the squares of the norm in fp32.
    equal_to_serial(
        tmp_path / "zero", [("zero", 4, "--stage", 2), ("zero", 2, "--stage", 3)], within=1e-6
    )
    (tmp_path / "odd").mkdir()
    equal_to_serial(tmp_path / "odd", [("fsdp", 3)], options=("--fp64", "--batch", "24"))
    (tmp_path / "drawn").mkdir()
    drawn = (
        "--model",
        "laptop",
        "--recompute",
        "--lr",
        "1e-3",
        "--min-lr",
        "1e-4",
        "--warm-up",
        "2",
    )
    equal_to_serial(
        tmp_path / "drawn", [("fsdp", 4), ("tp_pp", 4), ("ddp", 2)], options=("--fp64", *drawn)
    )


@pytest.mark.extended
def test_lamb_and_a_tied_head_equal_serial(tmp_path):
    options = (
        "--fp64",
        "--model",
        "gpt-c",
        "--length",
        "32",
        "--optimizer",
        "lamb",
        "--lr",
        "1e-2",
    )
    equal_to_serial(tmp_path, [("fsdp", 2), ("ddp", 2)], steps=2, options=options)


@pytest.mark.extended
def test_a_model_of_transformers_and_its_weights(tmp_path):
    """GPT-J from the table is equal under DDP, FSDP and ZeRO.
    A folder of transformers starts from its weights."""
    options = ("--model", "gptj-tiny")
    cases = [("ddp", 2), ("fsdp", 2), ("zero", 2, "--stage", 3)]
    equal_to_serial(tmp_path, cases, within=2e-5, options=options)
    program = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from aiscale.train.data import read_windows
from aiscale.train.options import options
torch.manual_seed(5)
sizes = dict(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2)
model = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
model.save_pretrained("theirs")
windows, *_ = read_windows(options().parse_args(["--model", "theirs"]))
order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
rows = windows[order[:16]]
logits = model(input_ids=rows[:, :-1]).logits
print(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    found, _ = run(
        "fsdp", "--steps", 1, "--model", "theirs", "--save", "r", ranks=2, folder=tmp_path
    )
    assert found[0] == pytest.approx(float(done.stdout.split()[-1]), abs=2e-5)


def sent_bytes(folder, trainer, steps):
    """{collective: bytes} that a rank of two passes in all, but for a checkpoint before the end."""
    script = f"{TRAIN / trainer}.py"
    words = [
        "-m",
        "aiscale.measure.traffic",
        script,
        "--steps",
        str(steps),
        "--save",
        f"{trainer}{steps}",
        "--save-every",
        "99",
    ]
    program = f"from aiscale.launch import launch; raise SystemExit(launch(2, {words}))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stdout.splitlines() if ": calls" in line]
    return {line.partition(":")[0]: int(line.split()[-1].replace(",", "")) for line in lines}


@pytest.mark.extended
def test_a_step_sends_the_bytes_that_the_lessons_predict(tmp_path):
    weights = {}
    for name, shape in tiny_shapes():
        part = "blocks" if name.startswith("blocks") else "root"
        weights[part] = weights.get(part, 0) + 4 * shape.numel()
        weights["tensors"] = weights.get("tensors", 0) + 1
    whole, micro_batches = weights["blocks"] + weights["root"], 4  # of a rank
    followed = 4 + 2 * 8  # the loss, and whether a rank was told to stop or must save
    expected = {
        "ddp": {"all_reduce": whole + followed},
        "fsdp": {
            # gloo sums all and FSDP keeps its slice; each tensor's norm is summed by itself
            "all_reduce": whole + followed + 4 * weights["tensors"],
            # blocks are gathered forward and backward, the root once
            "all_gather": micro_batches * (2 * weights["blocks"] + weights["root"]),
        },
    }
    for trainer, collectives in expected.items():
        few, many = sent_bytes(tmp_path, trainer, 2), sent_bytes(tmp_path, trainer, 4)
        for name, nbytes in collectives.items():
            assert (many[name] - few[name]) / 2 == nbytes, (trainer, name)


def tiny_shapes():
    with torch.device("meta"):
        model = GPT(shape_of("tiny"))
    return [(name, weight.shape) for name, weight in model.named_parameters()]


# Going on ----------------------------------------------------------------------------------------


def test_a_run_goes_on_under_another_strategy(tmp_path):
    run("serial", "--steps", 6, "--save", "whole", folder=tmp_path)
    run("fsdp", "--steps", 2, "--save", "parts", ranks=4, folder=tmp_path)
    run("ddp", "--steps", 4, "--save", "parts", ranks=2, folder=tmp_path)
    run("tp_pp", "--steps", 6, "--tp", 2, "--pp", 1, "--save", "parts", ranks=2, folder=tmp_path)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), abs=2e-5)
    assert [line["step"] for line in read_metrics(tmp_path / "parts")] == list(range(6))


@pytest.mark.extended
def test_radius_goes_on_in_a_sparse_step(tmp_path):
    options = ("--dense-until", 2, "--interval", 4)
    run("radius", "--steps", 8, "--save", "whole", *options, ranks=2, folder=tmp_path)
    run("radius", "--steps", 3, "--save", "parts", *options, ranks=2, folder=tmp_path)
    run("radius", "--steps", 8, "--save", "parts", *options, ranks=2, folder=tmp_path)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    run("serial", "--steps", 4, "--save-every", 2, folder=tmp_path)
    before = losses(tmp_path / "run")
    file = next((tmp_path / "run/00000004").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    again, said = run("serial", "--steps", 4, folder=tmp_path)
    assert "00000004 is damaged" in said
    assert list(again) == [2, 3]
    assert losses(tmp_path / "run") == pytest.approx(before, abs=1e-6)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signal")
def test_a_signal_from_the_first_moment_on_ends_a_run_with_a_checkpoint(tmp_path):
    """A scheduler's signal may come while torch is being imported."""
    note = tmp_path / "note"
    env = {**os.environ, "AISCALE_NOTE_SAVED": str(note)}
    command = [sys.executable, "-m", "aiscale.train.serial", "--steps", "100000"]
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)
    blocked = 1 << (signal.SIGUSR1 - 1)
    until = time.monotonic() + 120
    while time.monotonic() < until:  # until its first lines have run
        status = Path(f"/proc/{process.pid}/status").read_text()
        mask = int(status.partition("SigBlk:")[2].split()[0], 16)
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        if (mask | caught) & blocked:
            break
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=120) == 0
    steps = len(losses(tmp_path / "run"))
    assert 1 <= steps < 1000
    assert (tmp_path / f"run/{steps:08}/note.json").exists()
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "stopped"
    assert "stopped" in note.read_text()


@pytest.mark.extended
def test_a_rank_that_does_not_come_is_named_with_its_line(tmp_path):
    (tmp_path / "late.py").write_text("""
import time
import torch
import torch.distributed as dist
from aiscale.train import options, ranks
ranks.start(options.options().parse_args(["--patience", "10"]))
for step in range(100):
    if step == 5 and ranks.rank == 2:
        time.sleep(1000)
    dist.all_reduce(torch.ones(10))
""")
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            "from aiscale.launch import launch; raise SystemExit(launch(4, ['late.py']))",
        ],
        cwd=tmp_path,
        env={**os.environ, "AISCALE_NOTE_SAVED": "note", "SLURMD_NODENAME": "node7"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert said.returncode == 76
    lines = [line for line in said.stderr.splitlines() if "ranks wait" in line]
    assert len(lines) == 1
    assert "rank 2 on node7 has begun" in lines[0] and "at late.py:9" in lines[0]
    assert (tmp_path / "note").read_text() == "hung\nbad node7\n"


@pytest.mark.slurm
@pytest.mark.extended
@pytest.mark.timeout(900)
def test_a_site_starts_a_trainer_as_it_starts_a_script_of_yours(place):
    """On two virtual nodes of Perlmutter: eight ranks, whose losses are those of one process."""
    python = place / ".venv/bin/python"  # where the launcher looks
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    launcher = ROOT / "launchers/perlmutter/your_own.sbatch"
    words = ["-m", "aiscale.train.fsdp", "--steps=3", f"--save={place / 'slurm'}"]
    with Cluster(site="perlmutter", nodes=2) as nodes:
        job = nodes.submit(launcher, "--nodes=2", "--time=10", args=words, cwd=place)
        state = nodes.wait(job, timeout_s=600)
        assert state == "COMPLETED", (place / f"your_own-{job}.out").read_text()
    run("serial", "--steps", 3, "--save", "serial", folder=place)
    assert losses(place / "slurm") == pytest.approx(losses(place / "serial"), abs=2e-5)


# Refusals ----------------------------------------------------------------------------------------


@pytest.fixture
def refused(capsys):
    """Calls a function that must refuse; returns the line that it prints."""

    def call(function, *arguments):
        with pytest.raises(SystemExit) as ended:
            function(*arguments)
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1, said
        return said

    return call


def test_bad_settings_get_one_line(tmp_path, refused):
    parse = options.options().parse_args
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("x" * 64)
    cases = {
        ("--text", str(tmp_path / "empty")): "is no folder and no file with a text in it",
        ("--text", str(tmp_path)): "holds no tokens: `aiscale data prepare` makes them",
        ("--length", "65"): "--length 65 is too long: --model tiny reads at most 64 tokens",
        ("--model", "nowhere"): "--model nowhere is no folder with a config.json",
        ("--model", "2x100"): "100 is no multiple of its 3 heads, .*: take 2x96",
        ("--length", "64", "--text", str(tmp_path / "short")): "no sequence of --length 64",
    }
    for given, message in cases.items():
        assert re.search(message, refused(data.read_windows, parse(given)))
    _, said = run("serial", "--batch", 15, status=2, folder=tmp_path)
    assert "--batch is 15: it must be a multiple of 1 copies of the model x --micro-batch 2" in said
    # its loss would be wrong
    _, said = run("zero", "--optimizer", "lamb", status=2, folder=tmp_path)
    assert "--optimizer lamb with --stage 2: DeepSpeed cuts the tensors" in said


def test_stages_cannot_share_a_tied_head():
    parse = options.options("tp_pp").parse_args
    words = ["--model", "gpt-c", "--tp", "1", "--pp"]
    assert "--pp 2: the head of gpt-c is its embedding" in misfit(parse([*words, "2"]), 2)
    assert misfit(parse([*words, "1"]), 1) is None
    assert misfit(parse(["--tp", "1", "--pp", "2"]), 2) is None


def test_radius_needs_an_interval():
    args = options.options("radius").parse_args(["--interval", "0"])
    assert "--interval 0: every step is dense at 1, which is the least" in misfit(args, 2)


def test_tp_pp_refuses_what_it_would_pass_over():
    parse = options.options("tp_pp").parse_args
    assert "--bf16: tp_pp computes in fp32 and fp64 only" in misfit(parse(["--bf16"]), 4)
    said = misfit(parse(["--evaluate-every", "5"]), 4)
    assert "--evaluate-every 5: tp_pp has no evaluation" in said


def test_a_rank_is_found_whoever_started_it():
    step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}
    openmpi = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    cases = [
        # mpiexec in a step of Slurm: its ranks inherit the step's numbers
        ({**step, "PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1"}, [2, 3, 1]),
        ({**step, **dict.fromkeys(openmpi, "1")}, [1, 1, 1]),
        # srun --mpi=pmi2 sets these, but no local rank
        ({**step, "PMI_RANK": "7", "PMI_SIZE": "8"}, [0, 1, 0]),
        ({**step, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}, [3, 4, 3]),
        ({}, [0, 1, 0]),
    ]
    program = f"""
import json, os
from aiscale.train import ranks
found = []
for env in {[env for env, _ in cases]}:
    os.environ.clear()
    os.environ.update(env)
    found.append(ranks.find_rank())
print(json.dumps(found))
"""
    # in a process of its own, for the module takes over signals
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [found for _, found in cases]


def test_a_batch_larger_than_the_text_has_each_sequence_as_often(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(101)))
    args = options.options().parse_args(
        ["--length", "10", "--batch", "24", "--text", str(tmp_path / "text")]
    )
    windows, *_ = data.read_windows(args)
    steps = [batch[:, 0].tolist() for _, batch in data.batches(windows, 0, args, 0, 1)]
    assert len(steps) == args.steps and all(len(step) == 24 for step in steps)
    for step in steps:  # ten sequences, three orders of them, the rest of which is dropped
        assert {step.count(first) for first in range(0, 100, 10)} <= {2, 3}
    assert steps[0] != steps[1]


def test_another_training_in_the_folder_is_refused(tmp_path):
    args = options.options().parse_args(["--save", str(tmp_path / "run")])
    assert record.other_training(args, 1) is None
    record.Record(args, 0, 1, "digest").finish("finished")
    assert record.other_training(args, 1) is None
    assert record.other_text(args, "digest") is None
    assert "learns from another text" in record.other_text(args, "other")
    args.seed = 1
    assert "has --seed 0, not 1" in record.other_training(args, 1)


def test_a_run_of_an_earlier_aiscale_is_refused_by_name(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"run": {}, "status": "finished"}))
    args = options.options().parse_args(["--save", str(tmp_path)])
    assert "holds a run of an earlier aiscale" in record.other_training(args, 1)


# What comes of a run -----------------------------------------------------------------------------


@pytest.mark.extended
@pytest.mark.parametrize("trainer", ["fsdp", "zero"])
@pytest.mark.parametrize("model", ["tiny", "gptj-tiny"])
def test_an_exported_model_has_the_loss_that_training_ended_with(tmp_path, trainer, model):
    """The next step's loss, of a training that goes on, is the exported model's on its batch."""
    options = ("--model", model, "--save", "run")
    run(trainer, "--steps", 2, *options, ranks=2, folder=tmp_path)
    command = [sys.executable, "-m", "aiscale", "export", "run", "exported"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    after, _ = run(trainer, "--steps", 3, *options, ranks=2, folder=tmp_path)
    program = """
import torch
from transformers import AutoModelForCausalLM
from aiscale.train.data import batches, read_windows
from aiscale.train.options import options
args = options().parse_args(["--steps", "3"])
windows, *_ = read_windows(args)
[(_, rows)] = batches(windows, 2, args, 0, 1)
logits = AutoModelForCausalLM.from_pretrained("exported")(rows[:, :-1]).logits
print(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert after[2] == pytest.approx(float(done.stdout.split()[-1]), abs=2e-5)
