"""The scripts that lessons write learn what one process does, however spread, killed or resumed."""

from __future__ import annotations

import gc
import importlib
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch.nn.functional import cross_entropy

from aiscale import lesson
from aiscale.lesson import gaps, scripts, workbooks, written
from aiscale.measure.distributed import rendezvous
from centre import Cluster
from lessons import run_script_cells
from ranks import said_on_two_nodes

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "workshop" / "your_own"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
#: In fp32: sums of other parts round otherwise. Measured: 1e-6, the last digit that is printed.
TOLERANCE = 2e-5
STEPS = 15


def losses(said: str) -> list[tuple[int, float]]:
    return [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+) loss (\S+)", said)]


def start(*command, cwd: Path, env=None) -> subprocess.CompletedProcess:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )


def train(
    name: str, ranks: int, cwd: Path, *options, steps: int = STEPS
) -> list[tuple[int, float]]:
    by_mpi = [Path(sys.executable).with_name("mpiexec"), "-n", ranks, sys.executable]
    command = by_mpi if name == "train_mpi.py" else [*TORCHRUN, f"--nproc-per-node={ranks}"]
    done = start(
        *command,
        SCRIPTS / name,
        f"--text={cwd.parent / 'text'}",
        f"--steps={steps}",
        *options,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
    if name == "train_megatron.py":  # its warnings are for its authors
        assert not re.search("warning|deprecat", done.stderr, re.IGNORECASE), done.stderr
    return losses(done.stdout)


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    """train.py over three epochs of a short text, in the folder above those in which ranks run."""
    place = tmp_path_factory.mktemp("serial")
    (place.parent / "text").write_text(Path(__file__).read_text()[:7000])
    done = start(
        sys.executable,
        SCRIPTS / "train.py",
        f"--text={place.parent / 'text'}",
        f"--steps={STEPS}",
        cwd=place,
    )
    assert done.returncode == 0, done.stderr
    printed = losses(done.stdout)
    assert len(printed) == STEPS and printed[-1][1] < printed[0][1]
    return printed


@pytest.fixture
def cwd(serial, tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


def assert_equal(found, serial) -> None:
    assert [step for step, _ in found] == [step for step, _ in serial]
    worst = max(abs(mine - theirs) for (_, mine), (_, theirs) in zip(found, serial, strict=True))
    assert worst < TOLERANCE, f"losses differ from train.py's by {worst}"


@pytest.mark.parametrize(
    "notebook", lesson.notebooks(root=ROOT / "notebooks"), ids=lambda notebook: notebook.name
)
def test_what_the_cells_of_a_lesson_write_lies_in_your_own(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    shell = InteractiveShell.instance()
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert len(re.findall(r"^\s*(?:for |\w+, )?folder(?: =|, )", code, re.M)) <= 1, (
        "another value than the parameter's"
    )
    scripts.load_ipython_extension(shell)
    for name in run_script_cells(shell, notebook, tmp_path):
        short, fillings = gaps.collapsed((tmp_path / name).read_text())
        for id in gaps.gaps_in(short):
            fillings[id] = gaps.Filling(workbooks.find(id)[1].lines)
        found = gaps.without_marks(gaps.expanded(short, fillings))
        assert found == (SCRIPTS / name).read_text()


def test_a_script_edited_by_hand_is_kept(tmp_path):
    script = tmp_path / "train.py"
    written.write(script, "first\n")
    written.write(script, "second\n")
    script.write_text("mine\n")
    assert "train.1.py" in written.write(script, "second\n")
    assert {path.name: path.read_text() for path in tmp_path.glob("*.py")} == {
        "train.py": "second\n",
        "train.1.py": "mine\n",
    }


def test_a_script_written_before_others_is_still_known_as_written_here(tmp_path):
    for name, text in (("a.py", "first\n"), ("b.py", "other\n"), ("a.py", "second\n")):
        written.write(tmp_path / name, text)
    assert sorted(path.name for path in tmp_path.glob("*.py")) == ["a.py", "b.py"]


def test_a_cell_that_is_edited_and_run_again_replaces_what_it_wrote(tmp_path, capsys):
    scripts.load_ipython_extension(shell := InteractiveShell.instance())
    script, first = tmp_path / "model.py", "class A:\n    x = 1\n"
    shell.run_cell_magic("write", f"{script}", first)
    for y in (1, 1, 2):
        shell.run_cell_magic("write", f"-a {script}", f"class B:\n    y = {y}\n")
    assert script.read_text() == f"{first}\n\nclass B:\n    y = 2\n"
    assert [line.endswith("write the rest") for line in capsys.readouterr().out.splitlines()] == [
        False
    ] * 3 + [True]


def test_cells_write_into_a_folder_whose_name_has_a_space(tmp_path):
    scripts.load_ipython_extension(shell := InteractiveShell.instance())
    shell.user_ns["folder"] = str(tmp_path / "my scripts")
    shell.run_cell_magic("write", "{folder}/train.py", "a = 1\n")
    shell.run_cell_magic("write", "-a {folder}/train.py", "b = 2\n")
    shell.run_cell_magic("change", "{folder}/train.py {folder}/train_ddp.py", "-b = 2\n+b = 3\n")
    shell.run_cell_magic("change", f'"{tmp_path}/my scripts/train_ddp.py"', "-a = 1\n+a = 0\n")
    assert (tmp_path / "my scripts/train.py").read_text() == "a = 1\n\n\nb = 2\n"
    assert (tmp_path / "my scripts/train_ddp.py").read_text() == "a = 0\n\n\nb = 3\n"
    with pytest.raises(lesson.LessonError, match="quote a path that has a space"):
        shell.run_cell_magic("write", f"{tmp_path}/my scripts/train.py", "a = 1\n")
    assert [path.name for path in tmp_path.iterdir()] == ["my scripts"]


def test_a_world_size_without_a_rank_divides_no_batch(serial, cwd):
    words = [SCRIPTS / "train.py", f"--text={cwd.parent / 'text'}", "--steps=2"]
    done = start(sys.executable, *words, cwd=cwd, env={"WORLD_SIZE": "4"})
    assert_equal(losses(done.stdout), serial[:2])


@pytest.fixture
def own(monkeypatch):
    """own(name) imports a script as its neighbours see it."""
    monkeypatch.syspath_prepend(SCRIPTS)
    names = {path.stem for path in SCRIPTS.glob("*.py")}
    before = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    yield importlib.import_module
    for name in names & sys.modules.keys():
        del sys.modules[name]
    sys.modules.update(before)


def test_the_newest_of_many_sharded_checkpoints_is_read(own, tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for steps in (9, 10, 100):
        own("sharded_checkpoint").save(tmp_path, model, optimizer, steps)
    assert own("sharded_checkpoint").load(tmp_path, model, optimizer) == 100


def test_radius_sends_the_entries_that_adam_moves_most(own):
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    model = torch.nn.ParameterList([weight])
    optimizer = torch.optim.AdamW(model)
    # |m| / sqrt(v) is 0.1, 2, 0.5 and 4; |m| / v would choose the first and the last.
    optimizer.state[weight] = {
        "exp_avg": torch.tensor([[1e-4, 6.0], [5.0, -8.0]]),
        "exp_avg_sq": torch.tensor([[1e-6, 9.0], [100.0, 4.0]]),
    }
    radius = own("train_radius").Radius(model, density=0.5, interval=1)
    radius.after_step(optimizer)
    assert radius.mask[weight].tolist() == [False, True, False, True]


def test_trainer_learns_the_next_byte(own, monkeypatch, tmp_path):
    """transformers' model shifts the labels itself."""
    import transformers  # takes seconds

    made = []
    own("model")
    monkeypatch.setattr(transformers.Trainer, "train", lambda trainer: made.append(trainer))
    monkeypatch.setattr(sys, "argv", ["trainer.py", f"--output_dir={tmp_path}", "--use_cpu"])
    runpy.run_path(str(SCRIPTS / "trainer.py"), run_name="__main__")
    model, window = made[0].model.eval(), made[0].train_dataset[3]
    shown = model(**{name: tensor[None] for name, tensor in window.items()})
    text = window["input_ids"]
    torch.testing.assert_close(shown.loss, cross_entropy(shown.logits[0, :-1], text[1:]))


def test_held_bytes_has_gradients_and_counts_a_storage_once(own):
    model = torch.nn.Linear(100, 10)
    gc.collect()  # what other tests have left must not go in between
    without = own("held").held_bytes(model)
    model(torch.ones(1, 100)).sum().backward()
    view = model.weight.detach()[0]
    assert own("held").held_bytes(model) - without == 4 * (100 * 10 + 10)
    assert view.numel() == 100


def test_two_ranks_learn_what_one_process_learns(serial, cwd):
    assert_equal(train("train_ddp.py", 2, cwd), serial)


def test_mpiexec_starts_a_script_that_is_written_for_torchrun(serial, cwd):
    mpiexec = Path(sys.executable).with_name("mpiexec")
    words = ["with_mpi.py", "train_ddp.py", f"--text={cwd.parent / 'text'}", "--steps=3"]
    words += [f"--save={cwd / 'checkpoint'}"]
    done = start(mpiexec, "-n", 2, sys.executable, *words, cwd=SCRIPTS)
    assert_equal(losses(done.stdout), serial[:3])


#: script, ranks until the run is cut off, ranks after it, options
SPREAD = [
    ("train_ranks.py", 2, 4, []),
    ("train_mpi.py", 2, 4, []),
    ("train_ddp.py", 2, 4, []),
    ("train_zero.py", 2, 2, []),
    ("train_fsdp.py", 2, 4, []),
    ("train_tp_pp.py", 4, 8, []),
    ("train_radius.py", 2, 4, ["--density=1"]),
]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "before", "after", "options"), SPREAD, ids=[name for name, *_ in SPREAD]
)
def test_each_script_learns_what_one_process_learns_and_goes_on(
    name, before, after, options, serial, cwd
):
    first = train(name, before, cwd, *options, steps=7)
    assert_equal(first + train(name, after, cwd, *options), serial)


@pytest.mark.extended
def test_megatron_learns_on_every_grid_what_it_learns_on_one_rank(serial, cwd):
    alone = ["--tp=1", "--pp=1", f"--save={cwd / 'alone'}"]
    first = train("train_megatron.py", 1, cwd, *alone, steps=2)
    grids = {"tp 2 x pp 2 x dp 2": (8, 2, 2), "tp 4": (4, 4, 1), "pp 4 x dp 2": (8, 1, 4)}
    for name in grids:
        shutil.copytree(cwd / "alone", cwd / name)  # the same weights: each grid would draw its own
    one = train("train_megatron.py", 1, cwd, *alone)
    assert one[-1][1] < first[0][1] - 1
    for name, (ranks, tp, pp) in grids.items():
        grid = [f"--tp={tp}", f"--pp={pp}", f"--save={cwd / name}"]
        assert_equal(train("train_megatron.py", ranks, cwd, *grid), one)


@pytest.mark.extended
def test_a_mixture_learns_on_ranks_what_it_learns_on_one_and_goes_on_with_others(serial, cwd):
    one = train("train_experts.py", 1, cwd, f"--save={cwd / 'one'}", steps=8)
    assert one[-1][1] < one[0][1] - 1
    first = train("train_experts.py", 2, cwd, f"--save={cwd / 'ranks'}", steps=4)
    assert_equal(first + train("train_experts.py", 4, cwd, f"--save={cwd / 'ranks'}", steps=8), one)


@pytest.mark.extended
def test_megatrons_experts_learn_on_eight_ranks_what_they_learn_on_one(serial, cwd):
    alone = ["--tp=1", "--pp=1", "--ep=1", f"--save={cwd / 'alone'}"]
    one = train("train_megatron_experts.py", 1, cwd, *alone, steps=3)
    for ep in (2, 4):
        found = train(
            "train_megatron_experts.py", 8, cwd, f"--ep={ep}", f"--save={cwd / f'{ep}'}", steps=3
        )
        assert_equal(found, one)


@pytest.mark.extended
def test_megatron_refuses_stages_without_layers(cwd):
    command = [*TORCHRUN, "--nproc-per-node=3", SCRIPTS / "train_megatron.py", "--tp=1", "--pp=3"]
    done = start(*command, cwd=cwd)
    assert done.returncode and "--pp 3 does not divide the 4 blocks: take 1, 2 or 4" in done.stderr


@pytest.mark.extended
@pytest.mark.parametrize("options", [["--density=0.4"], ["--density=0.4", "--interval=1"]])
def test_radius_falls_behind_by_little_and_by_nothing_if_every_step_is_dense(options, serial, cwd):
    sparse = train("train_radius.py", 2, cwd, *options)
    if len(options) == 2:
        assert_equal(sparse, serial)
    else:
        assert 0.001 < sparse[-1][1] - serial[-1][1] < 0.5


@pytest.mark.extended
@pytest.mark.parametrize("name", ["train_ddp.py", "train_fsdp.py"])
def test_a_killed_rank_costs_steps_and_changes_no_loss(name, serial, cwd):
    """SIGKILL after step 8; the last checkpoint is of 6 steps. torchrun starts all ranks anew."""
    command = [
        *TORCHRUN,
        "--nproc-per-node=2",
        "--max-restarts=1",
        SCRIPTS / name,
        f"--text={cwd.parent / 'text'}",
    ]
    command += [f"--steps={STEPS}", "--save-every=3"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    found = []
    with subprocess.Popen(
        list(map(str, command)), cwd=cwd, env=env, stdout=subprocess.PIPE, text=True
    ) as job:
        for line in job.stdout:
            found += losses(line)
            if len(found) == 8:
                ranks = [
                    child
                    for child in psutil.Process(job.pid).children()
                    if name in " ".join(child.cmdline())
                ]
                ranks[-1].kill()
                found.append(found[-1])  # so that this happens once
    assert job.returncode == 0
    del found[8]
    again = next(i for i in range(1, len(found)) if found[i][0] <= found[i - 1][0])
    assert found[again][0] % 3 == 0 and found[again][0] >= 6, (
        "it did not go on from the last checkpoint"
    )
    for half in (found[:again], found[again:]):
        assert_equal(half, [pair for pair in serial if half[0][0] <= pair[0] <= half[-1][0]])
    assert found[-1][0] == STEPS - 1


#: script, ranks on each of two nodes
APART = [
    ("train_ddp.py", 1),
    *(
        pytest.param(name, ranks, marks=pytest.mark.extended)
        for name, ranks in [
            ("train_ranks.py", 1),
            ("train_mpi.py", 1),
            ("train_profiled.py", 1),
            ("train_radius.py", 1),
            ("train_zero.py", 1),
            ("train_fsdp.py", 1),
            ("train_tp_pp.py", 2),
            ("train_megatron.py", 2),
        ]
    ),
]


@pytest.mark.parametrize(("name", "ranks"), APART)
def test_nodes_that_do_not_share_the_folder_of_the_checkpoint_take_no_step(
    name, ranks, serial, cwd
):
    train(name, 2 * ranks, cwd, steps=2)
    other = cwd.with_name(f"{cwd.name}_other_node")
    other.mkdir()
    before = contents(cwd)
    assert before
    words = [SCRIPTS / name, f"--text={cwd.parent / 'text'}", "--steps=4"]
    if name == "train_mpi.py":
        said = said_by_mpi_in([cwd, other], *words)
    else:
        said = said_on_two_nodes([cwd, other], *words, ranks=ranks)
    assert_refused(said)
    assert contents(cwd) == before and contents(other) == {}


@pytest.mark.extended
def test_a_trainer_of_transformers_on_nodes_that_share_no_folder_takes_no_step(tmp_path):
    nodes = [tmp_path / "0", tmp_path / "1"]
    for node in nodes:
        node.mkdir()
    words = [SCRIPTS / "trainer.py", "--output_dir=out", "--max_steps=2", "--logging_steps=1"]
    words += ["--report_to=none", "--disable_tqdm=true", "--use_cpu", "--ddp_backend=gloo"]
    assert_refused(said_on_two_nodes(nodes, *words))
    assert [contents(node) for node in nodes] == [{}, {}]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_refused(said: str) -> None:
    assert "does not see what rank 0 writes beside" in said, said
    assert "choose a folder that all nodes share" in said
    assert "loss" not in said


def said_by_mpi_in(folders: list[Path], *words) -> str:
    """What one rank in each folder prints; they fail."""
    first, second = (["-n", 1, "-wdir", folder, sys.executable, *words] for folder in folders)
    done = start(Path(sys.executable).with_name("mpiexec"), *first, ":", *second, cwd=folders[0])
    assert done.returncode
    return done.stdout + done.stderr


@pytest.mark.slurm
@pytest.mark.extended
def test_srun_starts_the_same_scripts(serial, place, monkeypatch):
    """On two virtual nodes: rank, address and port by Slurm; no card of this process's choice."""
    for name in ("GLOO_SOCKET_IFNAME", rendezvous._OUR_CARD):
        monkeypatch.setenv(name, "lo")
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # an earlier test of this process may have set it
        monkeypatch.delenv(name, raising=False)
    (place / "text").write_text(Path(__file__).read_text()[:7000])
    with Cluster(nodes=2, share=[SCRIPTS]) as nodes:
        for name in ("train_ddp.py", "train_fsdp.py"):
            command = [
                "bash",
                SCRIPTS / "with_slurm.sh",
                sys.executable,
                SCRIPTS / name,
                f"--text={place / 'text'}",
            ]
            command += [f"--steps={STEPS}", f"--save={place / name}.saved"]
            env = {"OMP_NUM_THREADS": "1"}
            done = nodes.run(
                command, ntasks=4, cwd=place, env=env, capture_output=True, timeout=300
            )
            assert done.returncode == 0, done.stderr
            assert_equal(losses(done.stdout), serial)


@pytest.mark.extended
@pytest.mark.slurm
@pytest.mark.timeout(620)
def test_the_launcher_of_your_own_script_trains_one_to_its_end(serial, place):
    """The shipped file, as it is, on two virtual nodes: 8 ranks, with the losses of one process."""
    (place / "text").write_text(Path(__file__).read_text()[:7000])
    python = place / ".venv/bin/python"  # where the launcher looks
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    with Cluster(site="perlmutter", nodes=2, share=[SCRIPTS]) as nodes:
        launcher = SCRIPTS.parents[1] / "launchers/perlmutter/your_own.sbatch"
        words = [SCRIPTS / "train_ddp.py", f"--text={place / 'text'}", f"--steps={STEPS}"]
        job = nodes.submit(launcher, "--nodes=2", "--time=10", args=words, cwd=place)
        assert nodes.wait(job, timeout_s=400) == "COMPLETED", (
            place / f"your_own-{job}.out"
        ).read_text()
    assert_equal(losses((place / f"your_own-{job}.out").read_text()), serial)


@pytest.mark.extended
def test_flags_alone_spread_a_trainer_of_transformers(tmp_path):
    flags = [
        "--max_steps=4",
        "--logging_steps=1",
        "--per_device_train_batch_size=4",
        "--save_strategy=no",
    ]
    flags += [
        "--report_to=none",
        "--disable_tqdm=true",
        "--output_dir=out",
        "--use_cpu",
        "--ddp_backend=gloo",
    ]
    said = {}
    for way in ("", "--fsdp", f"--deepspeed={SCRIPTS / 'ds_config.json'}"):
        command = [
            *TORCHRUN,
            "--nproc-per-node=2",
            SCRIPTS / "trainer.py",
            *flags,
            *filter(None, [way]),
        ]
        done = start(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        said[way] = re.findall(r"'loss': '?([\d.]+)", done.stdout)
    assert len(said[""]) == 4 and len({tuple(found) for found in said.values()}) == 1, said


@pytest.mark.extended
def test_ranks_that_hang_say_where_and_who_did_not_come(tmp_path):
    command = [*TORCHRUN, "--nproc-per-node=2", SCRIPTS / "hang.py", "--patience=5"]
    done = start(*command, cwd=tmp_path)
    assert done.returncode
    assert "Rank 1 failed to pass monitoredBarrier" in done.stderr
    assert (
        "rank 0 recorded number 3: gloo:all_reduce" in done.stdout
        and "rank 1 recorded number 4" in done.stdout
    )
