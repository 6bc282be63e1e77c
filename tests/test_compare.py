"""`aiscale compare`: finished runs' perplexity, time and curves by a baseline; what it refuses."""

import json
import math
import subprocess
import sys

import pytest

from aiscale.errors import ConfigError
from aiscale.measure.compare import compare, differences, page, table
from aiscale.train.options import options
from aiscale.train.record import read_metrics


@pytest.fixture
def folder(tmp_path):
    """folder(name, *options): a run of four steps, as a trainer leaves it."""

    def write(
        name,
        *words,
        trainer="radius",
        seconds=2.0,
        losses=(4, 3, 2, 1),
        val=1.5,
        status="finished",
        sha256="a" * 64,
        nodes=1,
        processor="one",
        ranks=2,
    ):
        args = options(trainer).parse_args(["--steps", "4", *words])
        machine = {"processor": processor, "cores": 2, "threads_per_rank": 1, "device": "cpu"}
        note = {"trainer": trainer, "options": vars(args), "text_sha256": sha256, "status": status}
        note |= {"world_size": ranks, "nodes": nodes, "machine": machine}
        lines = []
        for step, loss in enumerate(losses):
            lines.append({"kind": "train", "step": step, "loss": loss, "seconds": seconds})
        if val is not None:
            lines.append({"kind": "eval", "step": 3, "loss": val})
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps(note))
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text)
        return tmp_path / name

    return write


def seed(number):
    return "--seed", str(number)


def test_runs_are_rows_beside_the_baseline(folder):
    dense, radius = [], []
    for n in (1, 2):
        dense.append(folder(f"dense-{n}", *seed(n), trainer="ddp", val=n))
        losses = (4, 3, 2, 1 + n / 10)
        radius.append(folder(f"radius-{n}", *seed(n), seconds=1 + n / 2, losses=losses))
    baseline, row = compare([*dense, *radius])
    assert row["runs"] == list(map(str, radius)) and row["settings"]["density"] == 0.4
    assert baseline["settings"] == {} and baseline["speedup"] == (0, 0, 0)
    assert baseline["val_ppl"] == pytest.approx(((math.e + math.e**2) / 2, math.e, math.e**2))
    assert row["train_ppl"][1:] == pytest.approx((math.exp(1.1), math.exp(1.2)))
    # four steps of 1.5 and of 2 s
    assert row["days"] == pytest.approx((7 / 86_400, 6 / 86_400, 8 / 86_400))
    assert row["speedup"][1:] == pytest.approx((0, 1 / 3))
    assert row["time_saved"][1:] == pytest.approx((0, 1 / 4))
    assert row["loss_error"][-1] == pytest.approx((4, -0.15, -0.2, -0.1))
    assert row["val_ppl_curve"] == [(4, *[pytest.approx(math.exp(1.5))] * 3)]
    assert "trainer=radius, density=0.4" in page([baseline, row])


def test_the_loss_error_is_of_the_same_seed(folder):
    dense, radius = [], []
    for n in (1, 2):
        dense.append(folder(f"dense-{n}", *seed(n), trainer="ddp", losses=(4, n, n, n)))
        radius.append(folder(f"radius-{n}", *seed(n), losses=(4, n, n, n + 0.5)))
    assert compare([*dense, *radius])[1]["loss_error"][-2:] == [(3, 0, 0, 0), (4, -0.5, -0.5, -0.5)]


def test_other_ranks_nodes_and_machines_are_rows_of_their_own(folder):
    rows = compare(
        [
            folder("two", seconds=4.0),
            folder("elsewhere", *seed(2), "--save", "elsewhere", seconds=4.0),
            folder("four", ranks=4, seconds=2.0),
            folder("nodes", nodes=2, seconds=5.0),
            folder("machine", processor="other", seconds=1.0),
        ]
    )
    assert [len(row["runs"]) for row in rows] == [2, 1, 1, 1], "nodes of one kind are alike"
    assert [row["speedup"][0] for row in rows] == pytest.approx([0, 1, -0.2, 3])
    assert differences(rows) == ["four: ranks=4", "nodes: nodes=2", "machine: processor=other"]
    assert [line[1] for line in table(rows)] == ["ranks", "2", "4", "2", "2"]


def test_runs_that_repeat_a_seed_are_not_counted_as_seeds(folder):
    runs = [folder(f"run-{n}", *seed(s)) for n, s in enumerate((1, 1, 2))]
    assert table(compare(runs))[1][2] == "2 (3 runs)"
    assert table(compare(runs[1:]))[1][2] == "2"


@pytest.mark.parametrize(
    "words, facts, why",
    [
        ([], {"sha256": "b" * 64}, "has text with sha256 bbbbbbbb, .*dense has aaaaaaaa"),
        (["--batch", "32"], {}, "has tokens 8192, .*dense has 4096"),
        (["--model", "laptop"], {}, "has model laptop, .*dense has tiny"),
        (["--evaluate-batches", "2"], {}, "has sequences in an evaluation 32, .*dense has 16"),
        ([], {"status": "stopped", "losses": (4, 3)}, "step 2 of 4, and stopped: let it finish"),
        ([], {"val": None}, "no evaluation, .*: train with --held-out 0.1 --evaluate-every 100"),
    ],
)
def test_unlike_and_unfinished_runs_are_refused(folder, words, facts, why):
    with pytest.raises(ConfigError, match=why):
        compare([folder("dense", trainer="ddp"), folder("other", *words, **facts)])


def test_what_no_trainer_wrote_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="nowhere is no run folder"):
        compare([tmp_path / "nowhere"])
    (tmp_path / "run.json").write_text(json.dumps({"run": {}, "status": "finished"}))
    with pytest.raises(ConfigError, match="of an earlier aiscale, .*: train it again"):
        compare([tmp_path])


def test_evaluations_and_checkpoints_are_no_part_of_a_steps_seconds(tmp_path):
    """On a clock that only they move, and the reading of a batch."""
    program = """
import sys
from types import SimpleNamespace
sys.argv = ["serial", "--steps", "4", "--save", "run", "--save-every", "2"]
sys.argv += ["--held-out", "0.1", "--evaluate-every", "1"]
from aiscale.train import job, serial
from aiscale.train.options import options
clock = SimpleNamespace(now_s=0.5)
def slow(function):
    def call(*arguments):
        clock.now_s += 1000
        return function(*arguments)
    return call
job.time = SimpleNamespace(monotonic=lambda: clock.now_s)
job.evaluate, serial.save = slow(job.evaluate), slow(serial.save)
drawn = serial.batches
def slow_batches(*arguments):
    for each in drawn(*arguments):
        clock.now_s += 0.5
        yield each
serial.batches = slow_batches
serial.main(options().parse_args())
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    assert [line["seconds"] for line in read_metrics(tmp_path / "run")] == [0.5] * 4


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_a_real_pair(tmp_path):
    def aiscale(*words):
        command = [sys.executable, "-m", "aiscale", *words]
        return subprocess.run(command, cwd=tmp_path, stdout=-1, text=True, check=True)

    shared = "--nproc 2 --steps 60 --held-out 0.1 --evaluate-every 20 --save-every 0".split()
    compressed = "--interval 10 --dense-until 40".split()
    aiscale("train", "ddp", *shared, "--save", "runs/dense")
    aiscale("train", "radius", *shared, *compressed, "--save", "runs/radius")
    assert "radius" in aiscale("compare", "runs/dense", "runs/radius").stdout
    assert "<svg" in (tmp_path / "compare/index.html").read_text()
    dense, radius = json.loads((tmp_path / "compare/compare.json").read_text())
    errors = [error for step, error, *_ in radius["loss_error"] if step <= 41]
    assert all(abs(error) < 1e-6 for error in errors), "41 steps have the weights of 40 dense ones"
    assert dense["val_ppl"] != radius["val_ppl"]
