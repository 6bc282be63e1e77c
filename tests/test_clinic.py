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
    said = [node for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id in wanted]
    return {node.targets[0].id: ast.literal_eval(node.value) for node in said}


@pytest.mark.parametrize("name", NAMES)
def test_a_case_is_complete_and_its_page_gives_nothing_away(name):
    page, program = (CLINIC / f"{name}.md").read_text(), (CLINIC / f"{name}.py").read_text()
    case = solution(name)
    assert 40 <= len(program.splitlines()) <= 125
    assert f"{name}.py" in page and f"{name}.md" in (CLINIC / "README.md").read_text()
    letters = re.findall(r"^- (\w)\) ", page, re.M)
    assert {*case["REPLIES"], case["RIGHT"]} == set(letters) and len(letters) == 4
    assert case["RIGHT"] not in case["REPLIES"], "the right answer has a reply of a wrong one"
    assert len(case["HINTS"]) >= 3 and len(case["EXPLANATION"]) > 300
    for text in (page, program):
        for told in [*case["HINTS"], *case["EXPLANATION"].split("\n\n")]:
            assert told[:60] not in text


def test_a_case_from_copy_to_card(tmp_path):
    """Case 04 as a participant takes it: the wrong diagnosis, the right one, a hint, the repair, the card."""
    first = clinic("check", "04", "--because", "b", "--json", cwd=tmp_path)
    said = json.loads(first.stdout)
    assert first.returncode == 1 and not said["solved"], first.stderr
    assert "--max-norm 1000" in said["diagnosis"] and "in one process" in said["program"]
    assert (
        "Which norm is printed" in clinic("hint", "04", cwd=tmp_path).stdout + clinic("hint", "4", cwd=tmp_path).stdout
    )
    refused = clinic("explain", "04", cwd=tmp_path)
    assert refused.returncode == 2 and "not solved yet" in refused.stderr and "--give-up" in refused.stderr
    copy = tmp_path / "mine" / "04_gradients.py"
    lines = copy.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if "clip_grad_norm_" in line)
    lines[at : at + 2] = lines[at + 1], lines[at]
    copy.write_text("".join(lines))
    solved = clinic("check", "04", "--because", "a", cwd=tmp_path)
    assert solved.returncode == 0 and "Case 04_gradients is solved" in solved.stdout, solved.stderr
    card = json.loads((tmp_path / "progress" / "clinic.json").read_text())["predictions"]["clinic 04_gradients"]
    assert card["grade"] == "exact" and card["guess"] == "diagnosis and mended"
    assert re.search(r"04_gradients .* solved", clinic("list", cwd=tmp_path).stdout)


def test_wrong_words_are_refused_in_one_line(tmp_path):
    for words, said in (
        (("run", "11"), "no case is called '11': it may be one of 01_files"),
        (("check", "04", "--because", "e"), "--because is 'e': it must be one of the letters on 04_gradients.md"),
    ):
        done = clinic(*words, cwd=tmp_path)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.extended
@pytest.mark.parametrize("name", NAMES)
def test_faults_show_repairs_pass_and_wrong_repairs_are_answered(name, tmp_path):
    done = start(SOLUTIONS / "prove.py", name, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall("^ok ", done.stdout, re.M)) >= 4, "a fault, its repair, and two wrong ones at least"


@pytest.mark.extended
def test_a_copy_runs_under_torchrun(tmp_path):
    for file in ("04_gradients.py", "model.py"):
        shutil.copy(CLINIC / file, tmp_path)
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "04_gradients.py")
    done = start(*command, "--steps=3", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0 and "step 2 loss" in done.stdout, done.stderr
