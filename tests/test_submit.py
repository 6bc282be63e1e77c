"""`aiscale submit`: a fault that a job finds after hours in a queue is named before, in a line."""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from aiscale.cli import main
from aiscale.plan.layout import layout_of, shape_of
from aiscale.plan.memory import checkpoint_bytes
from aiscale.plan.options import planned
from aiscale.site import submit as checks
from aiscale.site.launchers import LESSONS
from aiscale.site.profiles import site
from aiscale.site.sbatch import Launcher, hours_of
from aiscale.site.submit import environment, host_memory, slurm, steps
from aiscale.train.options import TEXT
from centre import Cluster

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "launchers"

#: stand in for the site's programs on this machine; the test with a real Slurm is below
PROGRAMS = {
    "sbatch": 'echo "$*" >> "$CALLS"; '
    '[ -z "$REFUSE" ] || { echo "sbatch: error: $REFUSE" >&2; exit 1; }'
    '; wc -l < "$CALLS"',
    "lfs": 'echo "     /x  ${LFS_USED:-1}  ${LFS_QUOTA:-0} ${LFS_QUOTA:-0}  -  5 0 0 -"',
}
STATES = {"✓": "ok", "!": "warning", "✗": "wrong"}
#: `module` as a function of every shell, where one module is missing
MODULE = (
    '() { [ "$2" != pytorch/2.13.0 ] || [ -z "$MISSING" ] || '
    '{ echo "The following module(s) are unknown: $2" >&2; return 1; }; }'
)


@pytest.fixture
def login(tmp_path, monkeypatch):
    """A login node of Perlmutter, in a folder from which jobs are submitted."""
    (tmp_path / "bin").mkdir()
    for name, line in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "env/bin").mkdir(parents=True)
    python = f'#!/bin/bash\nPYTHONPATH="{ROOT / "src"}" exec {shlex.quote(sys.executable)} "$@"\n'
    (tmp_path / "env/bin/python").write_text(python)
    (tmp_path / "env/bin/python").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("BASH_FUNC_module%%", MODULE)
    monkeypatch.setenv("AISCALE_SITE", "perlmutter")
    monkeypatch.setenv("SBATCH_ACCOUNT", "m1234")
    monkeypatch.setenv("AISCALE_ENVIRONMENT", str(tmp_path / "env"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def submit(*words: str, capsys, file: str = "perlmutter/fsdp.sbatch") -> tuple[int, list[str], str]:
    """(exit status, the lines of the checks, what was printed)"""
    status = main(["submit", "--sbatch", "", str(FOLDER / file), *words])
    said = capsys.readouterr()
    return status, said.err.splitlines(), said.out


def found_line(options: str, name: str, capsys) -> str:
    """The line of one check."""
    main(["submit", "--dry-run", "--sbatch", options, str(FOLDER / "perlmutter/fsdp.sbatch")])
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if line[2:].startswith(f"{name} ")]
    return line


def test_a_job_without_a_fault_is_submitted_as_it_was_checked(login, capsys):
    status, lines, _ = submit("--steps", "7", capsys=capsys)
    assert status == 0, lines
    marks = {line.split()[1]: line[0] for line in lines if line[0] in "✓!✗"}
    # The first words: host is that of host memory.
    checks = {"environment", "corpus", "space", "host", "steps", "time", "modules", "Slurm"}
    assert set(marks) == checks | {"price"}
    assert set(marks.values()) == {"✓"}
    tested, submitted = (login / "calls").read_text().splitlines()
    assert tested == f"--test-only {submitted}" and submitted.endswith("fsdp.sbatch --steps 7")
    (price,) = [line for line in lines if "price" in line]
    assert "at most 4 nodes x 0.5 h = 2 node-hours; charged to m1234: 2 GPU node-hours" in price


@pytest.mark.parametrize("words", ["", "--bf16"])
def test_a_checkpoint_of_a_mixture_takes_what_the_planner_counts(words):
    run = planned("megatron", f"--model gpt2-medium --experts 8 --tp 1 --pp 1 {words}")
    counted = checkpoint_bytes(shape_of(run.model, 1024), layout_of(run, 8))
    assert checks.checkpoint_bytes(run, 8) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize(
    "fault, env, words, told",
    [
        (
            "environment",
            {"AISCALE_ENVIRONMENT": "/nowhere"},
            [],
            "/nowhere has no bin/python → launchers/perlmutter/b",
        ),
        (
            "corpus",
            {"AISCALE_CORPUS": "corpora/openwebtext"},
            [],
            "openwebtext does not exist → make it with `aiscale",
        ),
        (
            "space",
            {"LFS_USED": "1000", "LFS_QUOTA": "2000"},
            [],
            "1 MB are left of your quota → free some space",
        ),
        (
            "time",
            {"SBATCH_TIMELIMIT": "2-01:00:00"},
            [],
            "49 h on 4 nodes in QOS regular, which allows 48 h (no Slurm here: the profile's",
        ),
        (
            "time",
            {"SBATCH_QOS": "preempt"},
            [],
            "0.5 h on 4 nodes in QOS preempt, where a job must ask for 2 h at least (no Slurm here",
        ),
        (
            "signal",
            {"SBATCH_TIMELIMIT": "5"},
            [],
            "the job has 300 s, and --signal asks ranks to save 300 s before its end "
            "or up to 60 s earlier",
        ),
        (
            "layout",
            {},
            ["--micro-batch", "7"],
            "16 ranks: --batch is 480 → it must be a multiple of 16 copies of",
        ),
        ("layout", {}, ["--batch", "15"], "x --micro-batch 6, such as 96, or --sbatch '-N NODES'"),
        (
            "Slurm",
            {"REFUSE": "Invalid account"},
            [],
            "refuses it: sbatch: error: Invalid account → sacctmgr ",
        ),
        (
            "Slurm",
            {"REFUSE": "Could not establish a configuration source"},
            [],
            "does not answer here → submit from",
        ),
        (
            "modules",
            {"MISSING": "yes"},
            [],
            "cannot be loaded: The following module(s) are unknown: pytorch/2.13.0",
        ),
    ],
)
def test_each_planted_fault_is_named_in_one_line_with_its_remedy(
    fault, env, words, told, login, capsys, monkeypatch
):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    status, lines, _ = submit(*words, capsys=capsys)
    (wrong,) = [line for line in lines if line.startswith("✗")]
    assert status == 1 and wrong.split()[1] == fault and told in wrong and " → " in wrong, wrong
    assert lines[-1] == f"not submitted: {fault}"
    assert not [
        line for line in (login / "calls").read_text().splitlines() if "--test-only" not in line
    ]


def test_the_time_until_ranks_meet_is_counted_where_it_is_known():
    path = FOLDER / "frontier/3d_175b_256.sbatch"
    told = {}
    for nodes in (128, 256):
        job = Launcher.read(path, site("frontier"), sbatch=f"-N {nodes} -t 20")
        (told[nodes],) = steps(job, job.training().run)
    assert "20 take" in told[128].text
    assert told[256].state == "warning" and "20, and the time to meet, take" in told[256].text


@pytest.mark.parametrize(
    ("file", "words", "state", "told", "remedy"),
    [
        ("3d_22b", (), "ok", "8 ranks x 10.4 GB saving = 83.5 GB a node (planned) of 512 GB", ""),
        ("zero", (), "ok", "drawing weights", ""),
        ("zero", ("--model", "large"), "wrong", "which has 512 GB", "one tensor at a time"),
        ("fsdp", ("--model", "large"), "ok", "drawing weights", ""),
        (
            "3d_175b",
            ("--no-zero1", "--tp", "8", "--pp", "4"),
            "wrong",
            "saving",
            "without --no-zero1",
        ),
    ],
)
def test_a_job_whose_ranks_overfill_a_nodes_memory_is_refused(
    file, words, state, told, remedy, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "large").mkdir()
    shape = {
        "model_type": "gpt2",
        "n_layer": 600,
        "n_head": 25,
        "n_embd": 1600,
        "n_positions": 2048,
    }
    (tmp_path / "large/config.json").write_text(json.dumps(shape | {"vocab_size": 50257}))
    path = FOLDER / f"frontier/{file}.sbatch"
    job = Launcher.read(path, site("frontier"), args=words)
    (found,) = host_memory(job, job.training().run)
    assert found.state == state and told in found.text and remedy in found.remedy, found.line()
    # Without a figure nothing is ticked and nothing refused.
    job = Launcher.read(path, dataclasses.replace(site("frontier"), machine=""), args=words)
    (found,) = host_memory(job, job.training().run)
    assert found.state == "warning" and "the node's memory is unknown" in found.text


@pytest.mark.parametrize(
    ("words", "env", "told"),
    [
        (["--chain", "0"], {}, "--chain is 0: it is a number of jobs, so at least 1"),
        (["--chain", "-2"], {}, "--chain is -2: "),
        (
            ["--sbatch", "-t 0"],
            {},
            "--time is 0, which asks Slurm for no limit at all: give minutes, ",
        ),
        (["--sbatch", "-t 0:00"], {}, "--time is 0:00, which asks "),
        (["--sbatch", "-N 1-4"], {}, "--nodes is 1-4: price and layout follow from one number of "),
        (["--sbatch", "-N 0"], {}, "--nodes is 0: "),
        (["--sbatch=--requeue"], {"RESTARTS": "-1"}, "RESTARTS is -1: it must be a whole number"),
    ],
)
def test_a_setting_without_a_price_is_refused_in_one_line(
    words, env, told, login, capsys, monkeypatch
):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert main(["submit", "--dry-run", *words, str(FOLDER / "perlmutter/fsdp.sbatch")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"aiscale: {told}")


def test_a_line_of_sbatch_below_a_command_is_refused_as_slurm_does_not_read_it(login, capsys):
    text = (FOLDER / "perlmutter/fsdp.sbatch").read_text()
    (login / "mine.sbatch").write_text(
        text.replace("#SBATCH --nodes", "umask 077\n#SBATCH --nodes")
    )
    number = text[: text.index("#SBATCH --nodes")].count("\n") + 1
    assert main(["submit", "--dry-run", "mine.sbatch"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"aiscale: mine.sbatch, line {number + 1}: Slurm reads no #SBATCH below the first command, "
        f"which is line {number}: move it above that"
    )


@pytest.mark.parametrize(
    ("option", "what"),
    [("-q premium", "QOS premium"), ("-p fast", "partition fast")],
)
def test_limit_and_charge_of_what_the_profile_lacks_are_unknown(option, what, login, capsys):
    file = str(FOLDER / "perlmutter/fsdp.sbatch")
    assert main(["submit", "--dry-run", "--sbatch", option, file]) == 0
    lines = capsys.readouterr().err.splitlines()
    for name in ("time", "price"):
        (line,) = [line for line in lines if line[2:].startswith(f"{name} ")]
        assert line.startswith("!") and "unknown" in line and f" profile has no {what}" in line


ANSWERS = {
    "scontrol": "PartitionName=gpu Default=YES MaxNodes=UNLIMITED MaxTime=2-00:00:00 QoS=N/A",
    "sinfo": "gpu,a100|256000+\ngpu,hbm80g|256000",
    "sshare": "m1234|{user}\nm1234_g|{user}",
    "qos": "gpu_regular|1.000000|2-00:00:00|node=1536|\ngpu_debug|1.000000|00:30:00|node=8|\n"
    "gpu_premium|2.000000|1-00:00:00||\ngpu_big|0.500000|||gres/gpu=512,node=128",
}


@pytest.fixture
def machine(login):
    """The login node, where Slurm answers what is asked of it; machine(qos="...") changes that."""
    user = getpass.getuser()

    def answer(**changed: str) -> None:
        for name, text in (ANSWERS | changed).items():
            text = text.format(user=user)
            lines = "" if text else "exit 1\n"
            if name == "qos":
                name, lines = (
                    "sacctmgr",
                    f'case "$*" in *"show qos"*) ;; *) exit 1 ;; esac\n{lines}',
                )
            path = login / "bin" / name
            path.write_text(f"#!/bin/bash\n{lines}cat << 'END'\n{text}\nEND\n")
            path.chmod(0o755)

    answer()
    return answer


@pytest.mark.parametrize(
    ("options", "name", "state", "told"),
    [
        ("-N 4 -t 60", "time", "✓", "QOS gpu_regular and partition gpu allow at most 48 h"),
        ("-N 4 -t 60", "account", "✓", "m1234, as sshare says"),
        ("-N 4 -t 60", "host memory", "✓", "of 268.4 GB"),
        ("-N 4 -t 60", "price", "✓", "4 GPU node-hours (factor 1 of QOS gpu_regular, as"),
        (
            "-N 4 -t 60 -q premium",
            "price",
            "✓",
            "m1234: 8 GPU node-hours (factor 2 of QOS gpu_",
        ),
        (
            "-N 4 -t 60 -q debug",
            "time",
            "✗",
            "1 h, and QOS gpu_debug (sacctmgr show qos) allows",
        ),
        (
            "-N 9 -t 20 -q debug",
            "time",
            "✗",
            "9 nodes, and QOS gpu_debug (sacctmgr show qos) al",
        ),
        (
            "-N 4 -t 60 -q big",
            "time",
            "✗",
            "4 nodes, and QOS gpu_big (sacctmgr show qos) want",
        ),
        ("-N 4 -t 60 -q fast", "time", "✗", "this machine has no QOS fast → --sbatch '-q NAME'"),
        ("-N 4 -t 60 -p fast", "time", "✗", "this machine has no partition fast → --sbatch '-p N"),
        ("-N 4 -t 60 -A m9", "account", "✗", "m9 is none of yours, which are m1234, m1234_g → "),
        (
            "-N 64 -t 60",
            "start",
            "!",
            "256 ranks take to meet is unknown; on 256 nodes it w",
        ),
    ],
)
def test_limits_and_price_are_what_the_machine_says(options, name, state, told, machine, capsys):
    line = found_line(options, name, capsys)
    assert line.startswith(state) and told in line


def test_a_row_that_the_centre_changes_changes_what_submit_says(machine, capsys):
    machine(qos="gpu_regular|3.000000|00:40:00||")
    assert "12 GPU node-hours (factor 3 of" in found_line("-N 4 -t 60", "price", capsys)
    assert found_line("-N 4 -t 60", "time", capsys).startswith("✗ time")
    machine(sinfo="gpu|1000")
    assert found_line("-N 4 -t 60", "host memory", capsys).startswith("✗ host memory")


@pytest.mark.parametrize(
    ("silent", "name"),
    [("qos", "time"), ("qos", "price"), ("sshare", "account"), ("sinfo", "host memory")],
)
def test_what_slurm_does_not_say_is_unknown_and_never_ticked(silent, name, machine, capsys):
    machine(**{silent: ""})
    line = found_line("-N 4 -t 60", name, capsys)
    assert line.startswith("!") and "unknown" in line


@pytest.mark.parametrize(
    ("nodes", "packed", "state"), [(64, "", "warning"), (64, ".tar.gz", "ok"), (2, "", "ok")]
)
def test_an_environment_that_many_nodes_read_should_be_packed(
    nodes, packed, state, login, monkeypatch
):
    (login / "env.tar.gz").touch()
    monkeypatch.setenv("AISCALE_ENVIRONMENT", f"{login / 'env'}{packed}")
    job = Launcher.read(FOLDER / "frontier/fsdp.sbatch", site("frontier"), sbatch=f"-N {nodes}")
    assert ("--constraint=nvme" in job.command) == bool(packed), "the nodes' own disks"
    (finding,) = environment(job)
    assert finding.state == state and ("--pack" in finding.remedy) == (state == "warning"), finding


@pytest.mark.parametrize(
    ("refusal", "remedy"),
    [
        ("Invalid account or account/partition combination specified", "sacctmgr show assoc"),
        ("Invalid qos specification", "sacctmgr show assoc"),
        ("Job violates accounting/QOS policy (job submit limit)", "maxsubmitpu"),
        ("invalid partition specified: fast", "sinfo --summarize"),
        ("Requested node configuration is not available", "%f"),
        ("Invalid feature specification", "%f"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "MaxTime"),
        ("Unable to open file", "change what it names"),
    ],
)
def test_each_refusal_of_slurms_gets_its_own_remedy(refusal, remedy, login, monkeypatch):
    monkeypatch.setenv("REFUSE", refusal)
    finding = slurm(Launcher.read(FOLDER / "perlmutter/fsdp.sbatch", site("perlmutter")))
    assert finding.state == "wrong" and remedy in finding.remedy


@pytest.mark.parametrize(
    "options, starts, most",
    [("-N4 -t 12:31:00", {}, "50.07"), ("", {"CHAIN": "1", "RESTARTS": "25"}, "52")],
)
def test_jobs_above_50_node_hours_are_submitted_only_with_yes(
    options, starts, most, login, capsys, monkeypatch
):
    for name, value in starts.items():
        monkeypatch.setenv(name, value)
    file = str(FOLDER / "perlmutter/fsdp.sbatch")
    assert main(["submit", "--sbatch", options, file]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    remedy = f"if you mean it, aiscale submit --yes {file}"
    assert told == f"not submitted: up to {most} node-hours, more than 50: {remedy}"
    assert main(["submit", "--sbatch", options, file, "--dry-run"]) == 0
    assert all("--test-only" in line for line in (login / "calls").read_text().splitlines())
    for words in (["--yes", "--sbatch", options, file], ["--sbatch", options, file, "--yes"]):
        assert main(["submit", *words]) == 0
        assert (login / "calls").read_text().splitlines()[-1].endswith("fsdp.sbatch")


def test_a_dry_run_prints_the_command_and_submits_nothing(login, capsys, monkeypatch):
    monkeypatch.setenv("CHAIN", "1")
    file = FOLDER / "perlmutter/fsdp.sbatch"
    assert (
        main(["submit", "--dry-run", "--sbatch", "-q debug -t 20", str(file), "--steps", "7"]) == 0
    )
    told = capsys.readouterr()
    site_sh = f"AISCALE_SITE_SH={FOLDER / 'perlmutter/site.sh'}"
    command = ["env", site_sh, *"sbatch -q debug -t 20 --requeue".split(), str(file)]
    assert told.out == f"{shlex.join([*command, '--steps', '7'])}\n"
    assert (
        "4 nodes x 0.333333 h x 6 starts" in told.err
        and "at most 0.5 h on 4 nodes in QOS debug" in told.err
    )
    assert "--test-only" in (login / "calls").read_text()


def test_each_job_of_a_chain_waits_for_the_one_before(login, capsys):
    file = str(FOLDER / "perlmutter/fsdp.sbatch")
    assert main(["submit", "--chain", "3", "--sbatch", "-J mine", file]) == 0
    told, calls = capsys.readouterr(), (login / "calls").read_text()
    assert told.out.split() == ["2", "3", "4"]
    assert re.findall(r"afterany:(\d+)", calls) == [
        "2",
        "3",
    ]
    assert "4 nodes x 0.5 h x 3 jobs = 6 node-hours" in told.err
    assert main(["submit", "--chain", "3", "--sbatch", "-q debug -t 20", file]) == 1
    assert "QOS debug forbids chains" in capsys.readouterr().err


@pytest.mark.parametrize(
    "path", sorted(f"{file.parent.name}/{file.name}" for file in FOLDER.glob("*/*.sbatch"))
)
def test_every_launcher_is_read_without_being_run(path, monkeypatch):
    for name in ("SBATCH_ACCOUNT", "SBATCH_QOS", "CHAIN"):
        monkeypatch.delenv(name, raising=False)
    place, lesson = site(path.split("/")[0]), LESSONS[Path(path).stem]
    job = Launcher.read(FOLDER / path, place)
    assert job.nodes >= 1 and 0 < job.hours <= 24 and job.starts == 1
    training = job.training()
    assert (training is None) == (lesson.work != "train")
    if training:
        assert training.trainer == lesson.trainer and training.args.model == lesson.model
        assert training.args.steps == (lesson.steps or lesson.training["steps"])
        assert training.args.text == (lesson.corpus or TEXT)
        assert training.misfit(job.ranks) is None
    assert [word for word in job.modules if "/" in word] or "$" in job.text


def test_the_readmes_dense_twin_of_radius_is_the_same_training_by_ddp(tmp_path):
    [command] = re.findall(r"^sed .*$", (FOLDER / "README.md").read_text(), re.M)
    subprocess.run(
        ["bash", "-c", f'cd "$1" && {command.replace("> ", "> $2/")}', "-", ROOT, tmp_path],
        check=True,
    )
    sparse = Launcher.read(FOLDER / "perlmutter/radius_355m.sbatch", site("perlmutter")).training()
    dense = Launcher.read(tmp_path / "dense.sbatch", site("perlmutter")).training()
    assert (sparse.trainer, dense.trainer) == ("radius", "ddp")
    own = {"density", "interval", "dense_until"}
    assert {key: value for key, value in vars(sparse.args).items() if key not in own} == vars(
        dense.args
    )


@pytest.mark.parametrize(
    "time, hours", [("30", 0.5), ("30:00", 0.5), ("1:30:00", 1.5), ("2-1", 49), ("1-00:30", 24.5)]
)
def test_times_are_read_as_sbatch_reads_them(time, hours):
    assert hours_of(time) == hours


@pytest.mark.slurm
@pytest.mark.extended
def test_under_a_real_slurm_faults_are_named_and_a_job_without_one_is_submitted(place):
    file = FOLDER / "perlmutter/ddp.sbatch"
    env = {"AISCALE_ENVIRONMENT": str(place / "env"), "CALLS": "/dev/null"}
    (place / "env/bin").mkdir(parents=True)
    python = place / "env/bin/python"
    quick = 'case "$*" in *"aiscale.train."*) exit ;; *doctor*) exit ;; esac'
    python.write_text(f'#!/bin/bash\n{quick}\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    words = [sys.executable, "-m", "aiscale", "submit", "--site", "perlmutter"]
    with Cluster(site="perlmutter", nodes=2) as nodes:

        def checks(
            *options: str, dry: bool = True, file: Path = file, **more: str
        ) -> dict[str, dict]:
            command = [*words, *(["--dry-run"] if dry else []), "--sbatch", " ".join(options), file]
            done = nodes.login(command, env={**env, **more}, cwd=place, capture_output=True)
            found = {}
            for line in done.stderr.splitlines():
                if line[:1] in STATES:
                    what, _, remedy = line[2:].partition(" → ")
                    found[what[:16].strip()] = {
                        "state": STATES[line[0]],
                        "found": what[17:],
                        "remedy": remedy,
                    }
            return found

        for options, more, name in (
            (("-N2", "-t 10"), {"SBATCH_ACCOUNT": "m7777"}, "Slurm"),
            (("-N2", "-t 40", "-q debug"), {}, "time"),
            (("-N2", "-t 10", "-q fast"), {}, "Slurm"),
            (("-N2", "-t 10"), {"AISCALE_ENVIRONMENT": "/nowhere"}, "environment"),
        ):
            found = checks(*options, **more)
            assert found[name]["state"] == "wrong" and found[name]["remedy"], found[name]
            assert (found["Slurm"]["state"] == "wrong") == (name != "environment"), (
                "Slurm refuses it too"
            )
        part = checks("-t 30", file=FOLDER / "perlmutter/notebook.sbatch")
        assert "charged to m1234: 0.03125 CPU node-hours" in part["price"]["found"], (
            "8 of 128 cores"
        )
        assert part["Slurm"]["state"] == "ok", part
        # The centre changes its table: submit says so, and nothing of the kit was touched.
        table = nodes.folder / "etc/qos"
        before = table.read_text()
        row = "gpu_regular|1.000000|2-00:00:00"
        assert (
            row in before
            and "factor 1 of QOS gpu_regular" in checks("-N2", "-t 10")["price"]["found"]
        )
        table.write_text(before.replace(row, "gpu_regular|4.000000|00:05:00"))
        changed = checks("-N2", "-t 10")
        assert "factor 4 of QOS gpu_regular" in changed["price"]["found"]
        assert (
            changed["time"]["state"] == "wrong" and "allows 0.0833333 h" in changed["time"]["found"]
        )
        table.write_text(before)
        found = checks("-N2", "-t 10", dry=False)
        assert {each["state"] for each in found.values()} == {"ok"}, found
        job = nodes.login(
            ["squeue", "--noheader", "--states=all", "--format=%i"], capture_output=True
        ).stdout.strip()
        assert nodes.wait(job) == "COMPLETED"
