"""The capstone's judge refuses a script that holds or sends too much; a good one passes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "workshop" / "capstone"
OWN = ROOT / "workshop" / "your_own"
sys.path.insert(0, str(FOLDER))

import judge  # noqa: E402


@pytest.fixture
def folder(tmp_path):
    for helper in OWN.iterdir():
        if helper.is_file() and not helper.name.startswith("train"):
            shutil.copy(helper, tmp_path)
    return tmp_path


def written(folder: Path, name: str) -> Path:
    text = (OWN / name).read_text()
    model = "model = (Llama() if args.llama else GPT()).to(device)"
    assert model in text
    script = folder / "train.py"
    script.write_text(text.replace(model, "model = Llama(width=320, layers=4).to(device)"))
    return script


def judged(script: Path, *arguments: str) -> tuple[int, list[str]]:
    command = [sys.executable, FOLDER / "judge.py", script, *arguments]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=ROOT)
    lines = [line[:10].strip() for line in done.stdout.splitlines() if line[:1] in "✓✗"]
    return done.returncode, lines or [done.stderr]


def test_what_a_rank_holds_and_sends_is_held_against_the_tasks_limits():
    held = [{"peak_bytes": mib * 2**20} for mib in (20, 96, 50)]
    assert judge.memory(held).holds and "96 MiB" in judge.memory(held).text
    assert not judge.memory([*held, {"peak_bytes": 97 * 2**20}]).holds
    # 20 MB, reduced in a ring of four, pass a link of 100 Mbit/s in 2.4 s.
    two = [{"sent": {"all_reduce": 20e6 * judge.STEPS}}, {"sent": {}}]
    assert "2.4 s" in judge.messages(two).text and judge.messages(two).holds
    assert not judge.messages([{"sent": {"all_gather": 120e6 * judge.STEPS}}]).holds


def test_the_job_is_held_against_the_sites_rules(folder):
    script = written(folder, "train_fsdp.py")
    line = judge.job(script, ["--micro-batch", "4"])
    assert line.holds and "node-hours" in line.text and "modules" in line.text
    assert not judge.job(folder / "none.py", []).holds


def test_the_model_of_the_task_holds_more_than_the_limit_if_every_rank_has_all_of_it():
    sys.path.insert(0, str(OWN))
    try:
        from llama import Llama
    finally:
        sys.path.remove(str(OWN))
    model = Llama(width=320, layers=4)
    states = 16 * sum(weight.numel() for weight in model.parameters()) / 2**20
    assert 70 < states < judge.MEMORY_MIB  # activations and buckets come on top
    assert "Llama(width=320, layers=4)" in judge.CHANGE


@pytest.mark.extended
def test_every_block_sharded_passes(folder):
    status, lines = judged(written(folder, "train_fsdp.py"), "--micro-batch", "4")
    assert (status, lines) == (0, ["✓ equal", "✓ memory", "✓ messages", "✓ job"])


@pytest.mark.extended
@pytest.mark.parametrize(
    "name,arguments,wrong",
    [("train_ddp.py", [], "✗ memory"), ("train_fsdp.py", ["--micro-batch", "2"], "✗ messages")],
)
def test_what_holds_or_sends_too_much_is_refused(folder, name, arguments, wrong):
    status, lines = judged(written(folder, name), *arguments)
    assert status == 1 and wrong in lines and "✓ equal" in lines
    assert [line for line in lines if line.startswith("✗")] == [wrong]
