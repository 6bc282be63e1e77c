"""`aiscale compare`: perplexity, time and curves of finished runs beside a baseline, and what it refuses."""

import json
import math
import subprocess
import sys

import pytest

from aiscale.config import ConfigError
from aiscale.recipes import recipe
from aiscale.study.compare import compare, differences, page, table


@pytest.fixture
def folder(tmp_path):
    """folder(name, *settings, step_s, losses, val, status): a run of four steps, as `aiscale train` leaves it."""

    def write(
        name,
        *settings,
        step_s=2.0,
        losses=(4, 3, 2, 1),
        val=1.5,
        status="finished",
        sha256="a" * 64,
        hosts=("node1", "node1"),
        processor="one",
    ):
        run = recipe("radius-tiny").override("loop.steps=4", *settings)
        note = {"run": run.to_dict(), "status": status, "total_steps": 4, "corpus": {"sha256": sha256}}
        note["world"] = {"size": len(hosts), "processes": [[host, 1] for host in hosts]}
        machine = {"processor": processor, "cores": 2, "threads_per_rank": 1, "device": "cpu"}
        note["machine"] = machine
        lines = [{"kind": "train", "step": i + 1, "loss": loss, "step_s": step_s} for i, loss in enumerate(losses)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps(note))
        lines += [{"kind": "eval", "step": 4, "loss": val}]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tmp_path / name

    return write


def test_runs_are_rows_beside_the_baseline(folder):
    dense = [folder(f"dense-{seed}", "compression.method=none", f"data.seed={seed}", val=seed) for seed in (1, 2)]
    radius = [folder(f"radius-{n}", f"data.seed={n}", step_s=1 + n / 2, losses=(4, 3, 2, 1 + n / 10)) for n in (1, 2)]
    baseline, row = compare([*dense, *radius])
    assert row["runs"] == list(map(str, radius)) and row["settings"]["compression.method"] == "radius"
    assert baseline["settings"] == {} and baseline["speedup"] == (0, 0, 0)
    assert baseline["val_ppl"] == pytest.approx(((math.e + math.e**2) / 2, math.e, math.e**2))
    assert row["train_ppl"][1:] == pytest.approx((math.exp(1.1), math.exp(1.2)))
    assert row["days"] == pytest.approx((7 / 86_400, 6 / 86_400, 8 / 86_400))  # four steps of 1.5 and of 2 s
    assert row["speedup"][1:] == pytest.approx((0, 1 / 3)) and row["time_saved"][1:] == pytest.approx((0, 1 / 4))
    assert row["loss_error"][-1] == pytest.approx((4, -0.15, -0.2, -0.1))
    assert row["val_ppl_curve"] == [(4, *[pytest.approx(math.exp(1.5))] * 3)]
    assert "compression.method=radius" in page([baseline, row])


def test_the_loss_error_is_of_the_same_seed(folder):
    dense = [folder(f"dense-{n}", "compression.method=none", f"loop.seed={n}", losses=(4, n, n, n)) for n in (1, 2)]
    radius = [folder(f"radius-{n}", f"loop.seed={n}", losses=(4, n, n, n + 0.5)) for n in (1, 2)]
    assert compare([*dense, *radius])[1]["loss_error"][-2:] == [(3, 0, 0, 0), (4, -0.5, -0.5, -0.5)]


def test_other_ranks_nodes_and_machines_are_rows_of_their_own(folder):
    rows = compare(
        [
            folder("two", step_s=4.0),
            folder("elsewhere", "loop.seed=2", hosts=("node2", "node2"), step_s=4.0),
            folder("four", hosts=("node1",) * 4, step_s=2.0),
            folder("nodes", hosts=("node1", "node2"), step_s=5.0),
            folder("machine", processor="other", step_s=1.0),
        ]
    )
    assert [len(row["runs"]) for row in rows] == [2, 1, 1, 1], "nodes of one kind are alike"
    assert [row["speedup"][0] for row in rows] == pytest.approx([0, 1, -0.2, 3])
    assert differences(rows) == ["four: ranks=4", "nodes: nodes=2", "machine: processor=other"]
    assert [line[1] for line in table(rows)] == ["ranks", "2", "4", "2", "2"]


def test_runs_that_repeat_a_seed_are_not_counted_as_seeds(folder):
    runs = [folder(f"run-{n}", f"loop.seed={seed}") for n, seed in enumerate((1, 1, 2))]
    assert table(compare(runs))[1][2] == "2 (3 runs)"
    assert table(compare(runs[1:]))[1][2] == "2"


@pytest.mark.parametrize(
    "settings, facts, why",
    [
        ([], {"sha256": "b" * 64}, "has corpus with sha256 bbbbbbbb, .*dense has aaaaaaaa"),
        (["loop.global_batch=32"], {}, "has tokens 8192, .*dense has 4096"),
        (["model.n_layer=4"], {}, "has model.n_layer 4, .*dense has 2"),
        ([], {"status": "stopped", "losses": (4, 3)}, "is at step 2 of 4, and stopped, .*let it finish first"),
    ],
)
def test_unlike_and_unfinished_runs_are_refused(folder, settings, facts, why):
    with pytest.raises(ConfigError, match=why):
        compare([folder("dense", "compression.method=none"), folder("other", *settings, **facts)])


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_a_real_pair(tmp_path):
    def aiscale(*words):
        return subprocess.run([sys.executable, "-m", "aiscale", *words], cwd=tmp_path, stdout=-1, text=True, check=True)

    for method in ("none", "radius"):
        settings = [
            f"--set={setting}" for setting in ("loop.steps=60", f"compression.method={method}", f"name={method}")
        ]
        aiscale("train", "--recipe", "radius-tiny", "--nproc", "2", "--quiet", *settings)
    assert "radius" in aiscale("compare", "runs/none", "runs/radius").stdout
    assert "<svg" in (tmp_path / "compare/index.html").read_text()
    dense, radius = json.loads((tmp_path / "compare/compare.json").read_text())
    errors = [error for step, error, *_ in radius["loss_error"] if step <= 41]
    assert all(abs(error) < 1e-6 for error in errors), "until step 40 both are dense, and step 41 uses their weights"
    assert dense["val_ppl"] != radius["val_ppl"]
