"""Every shell variable that a script of ours reads is set in it, or by the shell or Slurm.

shellcheck finds the same and more, but not every machine has it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from aiscale.site.kernel import start_script
from aiscale.site.launchers import render_all
from aiscale.site.profiles import names, site

ROOT = Path(__file__).parents[1]
SHELL = "HOME HOSTNAME LINENO PATH PWD SECONDS BASH_SOURCE USER TMPDIR DISPLAY"
SLURM = (
    "SLURM_SUBMIT_DIR SLURM_JOB_ID SLURM_JOB_NAME SLURM_JOB_NODELIST SLURM_JOB_QOS SLURM_NNODES "
    "SLURM_NTASKS SLURM_PROCID SLURM_LOCALID SLURM_RESTART_COUNT SLURM_NTASKS_PER_NODE "
    "SLURM_GPUS_PER_NODE SLURM_GPUS_ON_NODE SLURMD_NODENAME"
)
PBS = "PBS_O_WORKDIR PBS_NODEFILE PALS_RANKID PALS_LOCAL_RANKID PMI_RANK PMI_LOCAL_RANK"
SITES = "LD_LIBRARY_PATH CRAY_LD_LIBRARY_PATH NCCL_NET SCRATCH MEMBERWORK"
#: What users may set; the pages name each.
OURS = (
    "AISCALE_ENVIRONMENT AISCALE_RUNS AISCALE_CORPUS AISCALE_ENGINES AISCALE_SIF AISCALE_CHAIN "
    "AISCALE_RANKS AISCALE_FOLDER AISCALE_SOURCE AISCALE_TORCH_INDEX AISCALE_SITE AISCALE_CORPORA "
    "AISCALE_SHARE AISCALE_CLASS AISCALE_SITE_SH AISCALE_DOCTOR DOCTOR_NODES "
    "CHAIN RESTARTS SBATCH_ACCOUNT SBATCH_RESERVATION "
    "PYTORCH_INDEX PIP_NO_INDEX MPI MEET"
)
KNOWN = set(" ".join([SHELL, SLURM, PBS, SITES, OURS]).split())
#: of a launcher or a kernel, for the files that it sources, and of those for each other; `launch`
#: sets the last four
SOURCED = {"ENVIRONMENT", "RUNS", "AISCALE_KERNEL", "AISCALE_NOTE_SAVED", "step", "container"}
SOURCED |= {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def without_comments(text: str) -> str:
    return re.sub(r"(?m)(^|\s)#.*$", "", text)


def unset(text: str) -> set[str]:
    """The variables that a script reads and does not set."""
    text = without_comments(text)
    # what ${NAME:?words} says is not read
    text = re.sub(r":\?[^}]*\}", "}", text)
    read = set(re.findall(r"(?<!\\)\$\{?[!#]?([A-Za-z_]\w*)", text))
    for words in re.findall(r"(?m)(?:^|;|then|else) *export ([^;\n]+)", text):
        read |= set(re.findall(r"(?<![\w\"'$={,/.-])([A-Za-z_]\w*)(?=\s|$)", words))
    made = set(re.findall(r"(?<![\w$])([A-Za-z_]\w*)(?:\[[^]]*\])?[+:]?=", text))
    made |= set(re.findall(r"\bfor (?:\(\()?([A-Za-z_]\w*)", text))
    for words in re.findall(r"\b(?:read|local)((?: +-?\w+)+)", text):
        made |= set(words.split())
    return read - made


def scripts() -> dict[str, str]:
    done = subprocess.run(["git", "ls-files", "*.sh"], cwd=ROOT, capture_output=True, text=True)
    # a rehearsal's play Slurm, whose daemons set more
    paths = [path for path in done.stdout.split() if "rehearsal" not in path]
    return {path: (ROOT / path).read_text() for path in paths}


@pytest.mark.parametrize("name", names())
def test_a_launcher_reads_no_variable_that_nobody_sets(name):
    for file, text in render_all(site(name)).items():
        assert unset(text) - KNOWN - SOURCED == set(), file


@pytest.mark.parametrize("name", [*names(), None])
def test_the_start_of_a_kernel_reads_no_variable_that_nobody_sets(name, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").touch()
    text = start_script("mine", tmp_path, site(name) if name else None, "", {})
    assert unset(text) - KNOWN - SOURCED == set()


def test_a_script_reads_no_variable_that_nobody_sets():
    left = {file: unset(text) - KNOWN - SOURCED for file, text in scripts().items()}
    assert {file: names for file, names in left.items() if names} == {}


@pytest.mark.parametrize("file", ["frontier/ddp.sbatch", "perlmutter/site.sh"])
def test_each_misspelt_variable_is_found(file):
    text = without_comments((ROOT / "launchers" / file).read_text())
    for name in sorted(set(re.findall(r"\$\{?([A-Z]\w+)", text))):
        wrong = re.sub(rf"(\$\{{?){name}\b", rf"\g<1>{name}_", text)
        assert f"{name}_" in unset(wrong) - KNOWN, name
