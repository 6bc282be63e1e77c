"""The bug clinic: programs show their faults, mended ones pass, wrong repairs are answered."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

WORKSHOP = Path(__file__).parents[1] / "workshop"
CLINIC, SOLUTIONS = WORKSHOP / "clinic", WORKSHOP / "solutions" / "clinic"
NAMES = sorted(page.stem for page in CLINIC.glob("[0-9][0-9]_*.md"))


def start(*command, cwd: Path, **more) -> subprocess.CompletedProcess:
    env = {**os.environ, "AISCALE_PROGRESS": str(cwd / "progress"), **more}
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)


#: What a participant does, in one process, which loads torch once.
AS_A_PARTICIPANT = """
import sys
from pathlib import Path
sys.path.insert(0, {clinic!r})
import clinic
mine = Path("mine")
def say(*words):
    print("status", clinic.main([*words, f"--mine={{mine}}"]))
say("check", "04", "--because", "b")
say("explain", "04")
copy = mine / "04_gradients.py"
lines = copy.read_text().splitlines(keepends=True)
at = next(i for i, line in enumerate(lines) if "clip_grad_norm_" in line)
lines[at : at + 2] = lines[at + 1], lines[at]
copy.write_text("".join(lines))
say("check", "04", "--because", "a")
say("list")
"""


def test_a_case_from_copy_to_card(tmp_path):
    """Case 04: the wrong diagnosis and the faulty program, the right one and a repair, the card."""
    done = start("-c", AS_A_PARTICIPANT.format(clinic=str(CLINIC)), cwd=tmp_path)
    first, refused, solved, listed, _ = re.split(r"status \d\n", done.stdout)
    assert re.findall(r"status (\d)", done.stdout) == list("1200"), done.stderr
    assert (
        "✗ diagnosis: " in first
        and "--max-norm 1000" in first
        and re.search("✗ mended: .*in one process", first)
    )
    assert not refused and "not solved yet" in done.stderr and "--give-up" in done.stderr
    assert (
        "✓ diagnosis" in solved and "✓ mended" in solved and "Case 04_gradients is solved" in solved
    )
    assert re.search(r"04_gradients .* solved", listed)
    card = json.loads((tmp_path / "progress" / "clinic.json").read_text())["exercises"]["clinic.04"]
    assert card["state"] == "right" and card["tries"] == 2 and not card["solution"]


@pytest.mark.extended
@pytest.mark.parametrize("name", NAMES)
def test_faults_show_repairs_pass_and_wrong_repairs_are_answered(name, tmp_path):
    done = start(SOLUTIONS / "prove.py", name, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall("^ok ", done.stdout, re.M)) >= 4, (
        "a fault, its repair, and two wrong ones at least"
    )


@pytest.mark.extended
def test_a_copy_runs_under_torchrun(tmp_path):
    for file in ("04_gradients.py", "model.py"):
        shutil.copy(CLINIC / file, tmp_path)
    command = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "04_gradients.py",
    )
    done = start(*command, "--steps=3", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0 and "step 2 loss" in done.stdout, done.stderr
