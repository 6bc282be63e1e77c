"""aiscale.train.megatron: every grid trains what serial trains; a rank draws its own shard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aiscale.plan.layout import Layout, Shape
from aiscale.plan.memory import host_bytes
from aiscale.train.layout import misfit, other_experts
from aiscale.train.options import options
from aiscale.train.record import read_metrics

ROOT = Path(__file__).parents[1]
TRAINERS = ROOT / "src/aiscale/train"
#: Decay and clipping so strong that a wrong group, or a wrong norm, is seen in the next loss.
STRONG = ("--weight-decay", "0.5", "--clip", "0.5")
HELD_OUT = ("--held-out", "0.02", "--evaluate-every", "2")
#: Of losses; measured: up to 4e-7. Decay of biases and norms would change the second loss by 4e-4.
TOLERANCE = 1e-6


def run(*command, cwd: Path, paths: str = "") -> subprocess.CompletedProcess:
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), paths]),
    }
    command = [sys.executable, "-m", *map(str, command)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)


def train(trainer: str, ranks: int, folder: Path, *options) -> str:
    """What it printed on standard error."""
    words = [f"aiscale.train.{trainer}", "--save", folder, *options]
    if trainer == "megatron":
        words = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", *words]
    done = run(*words, cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    return done.stderr


def assert_equal(folder: Path, serial: Path, tolerance: float = TOLERANCE) -> None:
    for kind, name in (
        ("train", "loss"),
        ("train", "grad_norm"),
        ("train", "lr"),
        ("eval", "loss"),
    ):
        ours, theirs = read_metrics(folder, kind), read_metrics(serial, kind)
        assert [line["step"] for line in ours] == [line["step"] for line in theirs]
        rel = 10 * tolerance if name == "grad_norm" else tolerance
        assert [line[name] for line in ours] == pytest.approx(
            [line[name] for line in theirs], rel=rel
        ), name


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """What drawn_by_megatron.py found."""
    done = run("drawn_by_megatron", cwd=tmp_path_factory.mktemp("drawn"), paths=str(ROOT / "tests"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_each_rank_draws_its_part_of_the_model_that_the_other_trainers_draw(drawn):
    ends = {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert ends <= {name for rank in drawn for name in rank["names"]}
    assert [rank["differ"] for rank in drawn] == [[]] * 16


def test_a_rank_draws_within_twice_the_memory_of_its_shard(drawn):
    row_bytes = 4 * 4 * 512  # the longest row of a whole matrix, in fp32
    for rank in drawn:
        assert (
            2_000_000
            < rank["shard_bytes"]
            < rank["peak_bytes"]
            < 2 * rank["shard_bytes"] + row_bytes
        )
    # that of drawn_by_megatron.py
    shape = Shape(layers=2, heads=16, hidden=512, vocab=5003, seq=32)
    planned = host_bytes(shape, Layout(tp=8, pp=2, global_batch=1))["drawing weights"]
    assert all(rank["peak_bytes"] - rank["shard_bytes"] <= planned for rank in drawn)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--fp64", "--fp64"),
        ("--optimizer lamb", "lamb"),
        ("--compile", "--compile"),
        ("--bf16 --fp16", "--bf16 --fp16"),
        ("--model gptj-tiny", "gptj-tiny"),
        ("--tp 3 --pp 1", "--tp 3"),
        ("--pp 3", "--pp 3"),
        ("--pp 5", "--pp 5"),
        ("--pp 4 --virtual-stages 2", "--virtual-stages 2"),
        ("--model gpt-c --pp 2 --virtual-stages 3", "--pp 2"),
        ("--pp 4 --tp 1 --model gpt2 --batch 6 --virtual-stages 3", "3 micro-batches"),
        ("--tp 1 --sequence-parallel", "--tp 1"),
        ("--batch 15", "--batch is 15"),
        ("--ep 2", "--ep 2: there are no experts"),
        ("--experts 4 --top-k 5 --tp 1", "--top-k 5"),
        ("--experts 3 --ep 2 --tp 1", "--ep 2: it must divide --experts 3"),
        (
            "--experts 8 --ep 4 --tp 2 --sequence-parallel",
            "--ep 4: it must divide tp x dp = 4 ranks",
        ),
        ("--experts 4", "wants --sequence-parallel: add it"),
    ],
)
def test_what_megatron_core_cannot_do_is_refused_in_a_line(words, value):
    args = options("megatron").parse_args(words.split())
    reason = misfit(args, args.tp * args.pp)
    assert value in reason and "\n" not in reason
    assert misfit(options("megatron").parse_args([]), 4) is None


def test_experts_go_on_only_if_their_optimizer_stays_of_the_same_kind():
    """Else Megatron-Core finds no `optimizer` in the checkpoint."""
    grids = [(1, 1), (2, 1), (1, 2), (2, 2)]  # (tp, ep)
    alike = {(1, 1): 0} | dict.fromkeys(grids[1:], 1)
    for before in grids:
        for now in grids:
            was, args = (
                options("megatron").parse_args(f"--experts 4 --tp {tp} --ep {ep}".split())
                for tp, ep in (before, now)
            )
            assert (other_experts(vars(was), args) is None) == (alike[before] == alike[now])
    dense = [options("megatron").parse_args(["--tp", tp]) for tp in "12"]
    assert other_experts(vars(dense[0]), dense[1]) is None


@pytest.mark.extended
def test_a_run_goes_on_in_any_grid_and_equals_serial(tmp_path):
    folder, serial = tmp_path / "run", tmp_path / "serial"
    common = (*STRONG, *HELD_OUT, "--warm-up", "2", "--min-lr", "1e-4", "--decay-steps", "6")
    train("serial", 1, serial, "--steps", "6", *common)
    train("megatron", 8, folder, "--steps", "2", "--tp", "2", "--pp", "2", *common)
    grid = ("--tp", "2", "--pp", "1", "--sequence-parallel")
    train("megatron", 4, folder, "--steps", "4", *grid, *common)
    train("megatron", 4, folder, "--steps", "5", "--tp", "1", "--pp", "4", "--recompute", *common)
    newest = max(folder.glob("0*"))
    assert newest.name == "00000005"
    file = max(newest.glob("*.distcp"), key=lambda file: file.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    said = train("megatron", 1, folder, "--steps", "6", "--tp", "1", "--pp", "1", *common)
    assert f"{newest.name} is damaged ({file.name} is not what was written): going back" in said
    # The evaluation after step 4, the last one of the run that was damaged, is taken back with the
    # step.
    assert [line["step"] for line in read_metrics(folder)] == list(range(6))
    assert_equal(folder, serial)


@pytest.mark.extended
def test_a_mixture_goes_on_with_its_experts_on_other_ranks_and_equals_one_rank(tmp_path):
    folder, one = tmp_path / "run", tmp_path / "one"
    alone, together = ("--tp", "1", "--pp", "1"), ("--tp", "2", "--pp", "2", "--sequence-parallel")
    common = ("--experts", "4", "--aux-loss", "0.1", *STRONG, *HELD_OUT)
    train("megatron", 1, one, "--steps", "6", *alone, *common)
    train("megatron", 4, folder, "--steps", "2", *alone, "--ep", "4", *common)
    train("megatron", 8, folder, "--steps", "4", *together, "--ep", "2", *common)
    train("megatron", 2, folder, "--steps", "6", *alone, "--ep", "2", "--recompute", *common)
    assert_equal(folder, one)
    words = ("--save", folder, "--steps", "7", *map(str, (*alone, *common)))
    done = run("aiscale.train.megatron", *words, cwd=tmp_path)
    assert done.returncode == 2 and "has --ep 2 --tp 1, not --ep 1 --tp 1" in done.stderr


def test_the_parameters_of_a_mixture_are_counted_as_megatron_core_has_them(tmp_path):
    counted = """
import os
from aiscale import without_gpu
without_gpu.prepare_megatron()
from megatron.core import parallel_state, tensor_parallel
from aiscale.plan import cost
from aiscale.plan.options import run_of
from aiscale.train.megatron_model import configure, grid, pieces
from aiscale.train.options import options
from aiscale.train.ranks import start

args = options("megatron").parse_args("--tp 1 --pp 1 --experts 4 --save run".split())
start(args)
parallel_state.initialize_model_parallel(**grid(args), create_gloo_process_groups=False)
tensor_parallel.model_parallel_cuda_manual_seed(0)
(model,) = pieces(configure(args), args)
print(sum(weight.numel() for weight in model.parameters()))
print(cost.parameter_count(run_of("megatron", args).model))
"""
    done = subprocess.run(
        [sys.executable, "-c", counted],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    there, formula = done.stdout.split()
    assert there == formula


@pytest.mark.extended
def test_virtual_stages_and_tied_weights_equal_serial(tmp_path):
    folder, serial = tmp_path / "run", tmp_path / "serial"
    common = ("--model", "gpt-c", "--batch", "12", "--lr", "3e-4", *STRONG, *HELD_OUT)
    train("serial", 1, serial, "--steps", "4", *common)
    train(
        "megatron",
        3,
        folder,
        "--steps",
        "2",
        "--tp",
        "1",
        "--pp",
        "3",
        "--virtual-stages",
        "2",
        *common,
    )
    train("megatron", 2, folder, "--steps", "4", "--tp", "2", "--pp", "1", *common)
    assert_equal(folder, serial)


@pytest.mark.extended
@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
def test_half_precision_is_near_serial_and_resumes(precision, tmp_path):
    folder, whole, serial = tmp_path / "run", tmp_path / "whole", tmp_path / "serial"
    train("serial", 1, serial, "--steps", "4")
    two, one = ("--tp", "2", "--pp", "1"), ("--tp", "1", "--pp", "1")
    train("megatron", 1, whole, "--steps", "4", *one, precision)
    train("megatron", 2, folder, "--steps", "2", *two, precision)
    train("megatron", 1, folder, "--steps", "4", *one, precision)
    assert_equal(whole, serial, tolerance=0.02)
    assert_equal(folder, whole, tolerance=5e-3)


@pytest.mark.extended
def test_a_folder_of_another_optimizer_or_trainer_is_refused_before_it_is_read(tmp_path):
    one = ("--tp", "1", "--pp", "1", "--save-every", "1")
    train("megatron", 2, tmp_path / "run", "--steps", "1", *one, "--no-zero1")
    train("serial", 1, tmp_path / "serial", "--steps", "1")
    for folder, rule in (
        ("run", "has --no-zero1 True, not False"),
        ("serial", "is of the trainer serial, whose"),
    ):
        done = run("aiscale.train.megatron", "--save", folder, *one, cwd=tmp_path)
        assert done.returncode == 2 and f"--save {folder} {rule}" in done.stderr
        assert "Traceback" not in done.stderr
