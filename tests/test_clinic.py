"""The bug clinic: every program shows its fault, mended it passes, and plausible wrong repairs are answered."""

from __future__ import annotations

import ast
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


def clinic(*words, cwd: Path) -> subprocess.CompletedProcess:
    return start(CLINIC / "clinic.py", *words, f"--mine={cwd / 'mine'}", cwd=cwd)


def solution(name: str) -> dict:
    """The names that a solution defines, read without importing torch."""
    tree = ast.parse((SOLUTIONS / f"{name}_solved.py").read_text())
    wanted = ("RIGHT", "REPLIES", "HINTS", "EXPLANATION")
    set_ = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    return {name: ast.literal_eval(set_[name]) for name in wanted}


#: What a page would say to look at, and then there is nothing left to find.
CAUSES = {"03": "batch[", "04": "each line", "05": "each part", "07": "slice", "09": "mask"}


@pytest.mark.parametrize("name", NAMES)
def test_a_case_is_complete_and_its_page_gives_nothing_away(name):
    page, program = (CLINIC / f"{name}.md").read_text(), (CLINIC / f"{name}.py").read_text()
    case = solution(name)
    assert 40 <= len(program.splitlines()) <= 125
    assert f"{name}.py" in page and f"{name}.md" in (CLINIC / "README.md").read_text()
    letters = re.findall(r"^- (\w)\) ", page, re.M)
    assert {*case["REPLIES"], case["RIGHT"]} == set("abcd") and letters == list("abcd")
    assert case["RIGHT"] not in case["REPLIES"], "the right answer has a reply of a wrong one"
    assert len(case["HINTS"]) >= 3 and len(case["EXPLANATION"]) > 300
    useful = page.partition("**Useful here**")[2].partition("**What is it?**")[0]
    assert useful and CAUSES.get(name[:2], "\0") not in useful
    for text in (page, program):
        for told in [*case["HINTS"], *case["EXPLANATION"].split("\n\n")]:
            assert told[:60] not in text


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
    assert "✗ diagnosis: " in first and "--max-norm 1000" in first and re.search("✗ mended: .*in one process", first)
    assert not refused and "not solved yet" in done.stderr and "--give-up" in done.stderr
    assert "✓ diagnosis" in solved and "✓ mended" in solved and "Case 04_gradients is solved" in solved
    assert re.search(r"04_gradients .* solved", listed)
    card = json.loads((tmp_path / "progress" / "clinic.json").read_text())["exercises"]["clinic.04"]
    assert card["state"] == "right" and card["tries"] == 2 and not card["solution"]


@pytest.mark.extended
@pytest.mark.parametrize("name", NAMES)
def test_faults_show_repairs_pass_and_wrong_repairs_are_answered(name, tmp_path):
    done = start(SOLUTIONS / "prove.py", name, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall("^ok ", done.stdout, re.M)) >= 4, "a fault, its repair, and two wrong ones at least"


@pytest.mark.extended
def test_hints_come_one_by_one_and_who_gives_up_is_told(tmp_path):
    first, second = (clinic("hint", word, "--json", cwd=tmp_path).stdout for word in ("04", "4"))
    assert [len(json.loads(said)["hints"]) for said in (first, second)] == [1, 2]
    told = clinic("explain", "04", "--give-up", cwd=tmp_path).stdout
    assert "Clip after the reduction" in told and "+         average_gradients(parameters)" in told


@pytest.mark.extended
def test_a_copy_runs_under_torchrun(tmp_path):
    for file in ("04_gradients.py", "model.py"):
        shutil.copy(CLINIC / file, tmp_path)
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "04_gradients.py")
    done = start(*command, "--steps=3", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0 and "step 2 loss" in done.stdout, done.stderr
