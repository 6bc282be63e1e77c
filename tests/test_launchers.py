"""Launchers: committed files equal rendered ones, pass shellcheck, start what their lesson says.

Bash runs each file unmodified, with stand-ins for the site's programs (`srun`, `module`, `sbatch`,
...) that record their arguments; the trainer's own parser then reads its options, and a Run is
built from them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from aiscale.cli import _parser, main
from aiscale.measure import speed
from aiscale.plan import cost
from aiscale.plan.config import HFModelConfig, ModelConfig
from aiscale.plan.machines import find_machine
from aiscale.site.launchers import LESSONS, SHIPPED, drift, render_all
from aiscale.site.launchers.render import fits, place_for, sourced
from aiscale.site.profiles import load, names, site
from aiscale.site.sbatch import Training
from aiscale.train.options import options as trainers_options

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "launchers"
FILES = [
    f"{name}/{lesson}.sbatch"
    for name in SHIPPED
    for lesson in LESSONS
    if fits(LESSONS[lesson], site(name))
]
TRAINING = [path for path in FILES if LESSONS[Path(path).stem].work == "train"]
VARIANTS = [
    (path, words)
    for path in TRAINING
    for words in ["", *LESSONS[Path(path).stem].variants.values()]
]

#: stands in for every program of a site: records its name and arguments, and does the little that
#: the file needs
STUB = r"""#!/bin/bash
name="${0##*/}"
{ printf '%s\037' "$name" "$@"; echo; } >> "$CALLS"
case "$name $*" in
  "scontrol show hostnames"*) printf '%s\n' ${HOSTS:-node1} ;;
  hostname*) echo 10.0.0.1 ;;
  srun*" -m aiscale.train."*)
    if [ -n "${AISCALE_NOTE_SAVED:-}" ]; then
      for line in ${NOTES-runs/x/00000001}; do echo "${line//:/ }" >> "$AISCALE_NOTE_SAVED"; done
    fi
    exit "${TRAIN_STATUS:-0}" ;;
  srun*" -m aiscale doctor --node") # of some nodes there is no answer
    for node in ${HOSTS:-node1}; do
      [[ " ${BAD:-} " = *" $node "* ]] || echo "ready $node"
    done ;;
  srun*" -m aiscale doctor"*) exit "${DOCTOR_STATUS:-0}" ;;
  squeue*) printf '%s\n' "${WAITING:-78 (null)}" ;;
  srun*" -m aiscale.lesson.cluster "*) # FOLDER COUNT slurm
    stat -c %a "${@: -3:1}" >> "$CALLS.modes"
    for _ in $(seq "${ENGINES_LAST:-0}"); do [ -e "$CALLS.cancelled" ] || sleep 0.05; done ;;
  sbcast*) exit "${SBCAST_STATUS:-0}" ;;
esac
"""
PROGRAMS = (
    "module",
    "srun",
    "sbcast",
    "scontrol",
    "squeue",
    "hostname",
    "python",
    "shifter",
    "singularity",
    "conda-unpack",
)


def place_of(path: str):
    """The site of a file, or its nodes without GPUs if the file asks for no GPU."""
    place = place_for(LESSONS[Path(path).stem], site(path.split("/")[0]))
    return place if "gpus-per-node" in options((FOLDER / path).read_text()) else place.on_cpus()


def options(text: str) -> dict[str, str]:
    pairs = (
        line.split()[1].lstrip("-").partition("=")
        for line in text.splitlines()
        if line.startswith("#SBATCH ")
    )
    return {name: value for name, _, value in pairs}


class Job:
    """A launcher run by bash in a new folder, as sbatch would."""

    def __init__(self, tmp_path: Path, path: str, *words: str, nodes: int = 0, **env: str) -> None:
        self.calls_file, self.nodes = (
            tmp_path / "calls",
            nodes or int(options((FOLDER / path).read_text())["nodes"]),
        )
        programs = tmp_path / "programs"
        for folder in (programs, tmp_path / "env/bin", tmp_path / ".venv/bin"):
            folder.mkdir(parents=True, exist_ok=True)
        # A site's scripts read unset variables, which fails under set -u.
        (tmp_path / "bash_env").write_text(
            'module() { test -z "$NOBODY_SET_THIS"; command module "$@"; }\n'
        )
        for name in PROGRAMS:
            (programs / name).write_text(STUB)
            (programs / name).chmod(0o755)
        for environment in ("env", ".venv"):
            shutil.copy(programs / "python", tmp_path / environment / "bin")
        known = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "USER": "someone",
            "HOME": str(tmp_path),
            "TMPDIR": str(tmp_path),
        }
        known |= {
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_ID": "77",
            "SLURM_NNODES": str(self.nodes),
        }
        known |= {"SLURM_JOB_NODELIST": "node[1-9]", "CALLS": str(self.calls_file)}
        known |= {
            "CRAY_LD_LIBRARY_PATH": "/cray",
            "LD_LIBRARY_PATH": "/lib",
            "PYTHONPATH": str(ROOT / "src"),
        }
        known |= {
            "SLURM_JOB_NAME": Path(path).stem,
            "SLURM_JOB_QOS": "regular",
            "BASH_ENV": str(tmp_path / "bash_env"),
        }
        asked = options((FOLDER / path).read_text())
        known |= {"SLURM_NTASKS_PER_NODE": asked["ntasks-per-node"]}
        known |= {"SLURM_GPUS_PER_NODE": asked.get("gpus-per-node", "")}
        known |= {"AISCALE_SITE_SH": str((FOLDER / path).with_name("site.sh"))}
        if path.startswith("frontier"):
            known["AISCALE_ENVIRONMENT"] = str(tmp_path / "env")
        self.process = subprocess.Popen(
            ["bash", str(FOLDER / path), *words],
            cwd=tmp_path,
            env=known | env,
            text=True,
            stderr=subprocess.PIPE,
        )

    def finish(self) -> tuple[int, str]:
        """(exit status, standard error)"""
        _, self.log = self.process.communicate(timeout=30)
        return self.process.returncode, self.log

    def calls(self, program: str = "") -> list[list[str]]:
        """The arguments of each call of a program, in order."""
        lines = [
            line.rstrip("\037").split("\037") for line in self.calls_file.read_text().splitlines()
        ]
        return [line for line in lines if program in ("", line[0])]

    def steps(self) -> list[tuple[dict[str, str], Training]]:
        """(srun's options, what is trained) of every step that trains."""
        found = []
        for words in self.calls("srun"):
            end = words.index("-m") if "-m" in words else 0
            if end and words[end + 1].startswith("aiscale.train."):
                trainer = words[end + 1].removeprefix("aiscale.train.")
                pairs = (
                    word.lstrip("-").partition("=") for word in words[1 : words.index("python")]
                )
                args = trainers_options(trainer).parse_args(words[end + 2 :])
                found.append(({key: value for key, _, value in pairs}, Training(trainer, args)))
        return found


# The files ---------------------------------------------------------------------------------------


def test_committed_files_equal_the_rendered_ones():
    assert drift(FOLDER) == []


def test_check_names_files_edited_by_hand_and_files_without_a_lesson(tmp_path, capsys):
    shutil.copytree(FOLDER, tmp_path / "launchers")
    changed = tmp_path / "launchers/frontier/ddp.sbatch"
    changed.write_text(changed.read_text().replace("--nodes=2", "--nodes=3"))
    (tmp_path / "launchers/perlmutter/zero.sbatch").unlink()
    (tmp_path / "launchers/perlmutter/mine.sbatch").write_text("#!/bin/bash\n")
    assert main(["launchers", "--check", "--out", str(tmp_path / "launchers")]) == 1
    told = [
        Path(line).relative_to(tmp_path / "launchers")
        for line in capsys.readouterr().out.splitlines()
    ]
    assert list(map(str, told)) == [
        "frontier/ddp.sbatch",
        "perlmutter/mine.sbatch",
        "perlmutter/zero.sbatch",
    ]


@pytest.mark.parametrize("name", names())
def test_every_file_of_every_site_passes_bash_and_shellcheck(name, tmp_path):
    assert main(["launchers", "--site", name, "--out", str(tmp_path)]) == 0
    files = sorted(map(str, [*tmp_path.glob("*/*.sbatch"), *tmp_path.glob("*/*.pbs")]))
    assert len(files) >= (1 if site(name).pbs else 8)
    for file in files:
        assert subprocess.run(["bash", "-n", file], capture_output=True, text=True).stderr == ""
    folder = tmp_path / name
    files += [str(folder / file) for file in sourced(site(name)) if not site(name).pbs]
    if name in SHIPPED:
        for file in files:
            assert max(map(len, Path(file).read_text().splitlines())) <= 100, file
    if not shutil.which("shellcheck"):
        pytest.skip("no shellcheck on this machine")
    done = subprocess.run(["shellcheck", "-x", *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["polaris", "aurora"])
def test_pbs_files_ask_for_what_pbs_wants_and_start_a_rank_for_each_gpu(name, tmp_path):
    text, parser = render_all(site(name))["your_own.pbs"], argparse.ArgumentParser()
    for option in "AqNjk":
        parser.add_argument(f"-{option}", required=option != "k")
    parser.add_argument("-l", action="append")
    asked = parser.parse_args(
        [word for line in re.findall(r"(?m)^#PBS (.*)$", text) for word in line.split()]
    )
    resources = dict(word.split("=", 1) for word in asked.l)
    assert set(resources) == {"select", "place", "walltime", "filesystems"}
    assert resources["select"].startswith("2")
    assert text.index("#PBS -N") < re.search(r"(?m)^[^#\n]", text).start(), (
        "PBS reads no directive behind a command"
    )
    assert f'WORLD_SIZE="$((nodes * {site(name).node.gpus}))"' in text and "untried" in text.lower()


@pytest.mark.parametrize("path", FILES)
def test_no_file_requeues_itself_unless_asked_and_one_that_trains_for_long_says_so_first(path):
    text = (FOLDER / path).read_text()
    asked = options((FOLDER / path).read_text())
    lesson = LESSONS[Path(path).stem]
    hours, minutes, _ = map(int, asked["time"].split(":"))
    assert "requeue" not in asked and "CHAIN=1" not in re.sub(r"(?m)^#.*", "", text)
    assert lesson.work != "train" or "no-requeue" in asked
    if hours:
        assert lesson.hours == 24 and text.splitlines()[1].startswith("# Costs at most ")
    else:
        assert minutes < 60 and (lesson.work != "train" or 0 < lesson.steps <= 50)
    place = place_of(path)
    cpus = int(asked.get("cpus-per-task", "0")) * int(asked["ntasks-per-node"])
    most = int(asked["nodes"]) * (hours + minutes / 60)
    asked_of = asked.get("partition", ""), asked.get("qos", "")
    most *= place.share_of(cpus, *asked_of) * place.scheduler.charge(1, 1, asked_of[1])
    unit = place.scheduler.charge_unit.removesuffix("s")
    told = re.search(rf"([\d.,]+) {unit}", text.replace("\n# ", " "))[1]
    assert float(told.replace(",", "")) == pytest.approx(most, rel=0.05)
    if lesson.work in ("train", "scaling", "study"):
        assert asked["dependency"] == "singleton", "two jobs would write the same folder"


@pytest.mark.parametrize("path", FILES)
def test_requested_resources_are_within_the_sites_rules(path):
    place, asked = place_of(path), options((FOLDER / path).read_text())
    rules, nodes = place.scheduler, int(asked["nodes"])
    hours, minutes, _ = map(int, asked["time"].split(":"))
    assert hours + minutes / 60 <= rules.hours_for(
        nodes, asked.get("partition", ""), asked.get("qos", "")
    )
    assert re.fullmatch(rules.account_pattern, asked["account"])
    assert set(rules.required) <= set(asked)
    assert set(re.findall(r"[^&|]+", asked.get("constraint", ""))) <= set(rules.features)
    if place.node.gpus:
        assert int(asked["ntasks-per-node"]) == place.node.ranks_per_node
        assert int(asked["gpus-per-node"]) == place.node.gpus


@pytest.mark.parametrize(
    "name, cores, charge",
    [("perlmutter", 8, "0.03125 CPU node-hours"), ("lumi", 8, "4 CPU-core-hours")],
)
def test_a_notebook_has_cores_of_a_node_without_gpus_and_costs_no_whole_node(name, cores, charge):
    text, place = render_all(site(name))["notebook.sbatch"], site(name).on_cpus()
    asked, whole = options(text), place.node.cpus_per_rank * place.node.ranks_per_node
    cpus = int(asked["ntasks-per-node"]) * int(asked["cpus-per-task"])
    assert cpus / whole * place.node.cores == cores and "gpus-per-node" not in asked
    assert f"0.5 node-hours (charged: {charge})" in " ".join(text.split()), "of half an hour"
    assert set(place.scheduler.required) <= set(asked)
    assert asked["account"] in (
        "m1234",
        "project_465000000",
    )


def test_perlmutters_page_and_profile_count_its_nodes_as_the_catalogue_does():
    page = (FOLDER / "perlmutter/README.md").read_text()
    told = re.search(r"([\d,]+) nodes have GPUs of 80 GB .*?, ([\d,]+) of 40 GB", page).groups()
    profile = re.findall(r"(?<!\w)[\d,]*\d", site("perlmutter").scheduler.features["hbm80g"])
    there = [f"{find_machine(name).nodes:,}" for name in ("perlmutter-80gb", "perlmutter")]
    assert list(told) == there and profile == [there[0], "80", there[1], "40"]


@pytest.mark.parametrize("name", names())
def test_threads_of_all_ranks_fit_into_the_cores_that_a_job_has_of_a_node(name):
    jobs = {file: text for file, text in render_all(site(name)).items() if "OMP_" in text}
    assert set(jobs) == ({"your_own.pbs"} if site(name).pbs else {"site.sh", "notebook.sbatch"})
    for file, text in jobs.items():
        place = site(name)
        node = place_for(LESSONS["notebook"], place).node if "notebook" in file else place.node
        (threads,) = re.findall(r"OMP_NUM_THREADS=(\d+)", text)
        assert 1 <= int(threads) * node.ranks_per_node <= node.cores, file


@pytest.mark.parametrize("name", SHIPPED)
def test_a_file_that_trains_and_site_sh_are_short_and_evaluate_nothing(name):
    sourced = (FOLDER / name / "site.sh").read_text()
    for path in (path for path in TRAINING if path.startswith(name)):
        lines = ((FOLDER / path).read_text() + sourced).splitlines()
        code = [line for line in lines if re.match(r"\s*[^#\s]", line)]
        assert len(code) <= 50 and not re.search(r"\beval\b", "\n".join(code)), path


def test_a_new_version_of_a_module_changes_one_file():
    place = site("frontier")
    newer = place.shell.modules.replace("rocm/7.1.1", "rocm/7.2.0")
    changed = dataclasses.replace(place, shell=dataclasses.replace(place.shell, modules=newer))
    before, after = render_all(place), render_all(changed)
    assert [name for name in before if before[name] != after[name]] == ["site.sh"]


# What they start ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path, words", VARIANTS)
def test_the_training_command_parses_and_fits_the_ranks_and_gpu_memory(path, words, tmp_path):
    place, lesson = place_of(path), LESSONS[Path(path).stem]
    job = Job(tmp_path, path, "--steps", "7", *words.split())
    assert job.finish() == (0, "")
    [(step, training)] = job.steps()
    ranks = int(step["nodes"]) * int(step["ntasks-per-node"])
    assert "label" in step and ranks == job.nodes * place.node.ranks_per_node >= lesson.ranks
    assert int(step["nodes"]) == job.nodes
    assert int(step["cpus-per-task"]) == place.node.cpus_per_rank
    args, run = training.args, training.run
    assert args.patience == 1200, "file systems of centres pause for long"
    assert run.parallel.distributed_optimizer == (training.trainer == "megatron")
    fitting = re.search(r"fits -N ([\d, or]+)", (FOLDER / path).read_text())
    for nodes in (job.nodes, *map(int, re.findall(r"\d+", fitting[1] if fitting else ""))):
        assert training.misfit(nodes * place.node.ranks_per_node) is None, nodes
    assert args.steps == 7, "what follows the file's name reaches the trainer"
    assert args.save == str(tmp_path / "runs" / Path(path).stem)
    assert run.parallel.tp <= place.node.gpus, "tensor parallelism would leave the node"
    assert needs_gb(run, ranks) < 0.9 * memory_gb(place, path)
    if lesson.name == "zero":
        undivided = dataclasses.replace(
            run, parallel=dataclasses.replace(run.parallel, zero_stage=0)
        )
        assert needs_gb(undivided, ranks) > memory_gb(place, path)


@pytest.mark.parametrize("path", TRAINING)
def test_what_is_published_of_a_model_stands_in_its_file(path):
    lesson, text = LESSONS[Path(path).stem], (FOLDER / path).read_text()
    [lines] = re.findall(r"^launch python -m aiscale\.train\.(.*?)(?<!\\)$", text, re.M | re.S)
    words = lines.replace("\\", "").split()
    replaced = {"forge_l": ("optimizer", "lr", "min_lr"), "3d_175b_256": ("batch",)}
    replaced = replaced.get(lesson.name, ())
    for name, value in lesson.training.items():
        option = "--" + name.replace("_", "-")
        if name not in ("steps", "warm_up", *replaced):
            said = words[words.index(option) + 1]
            assert said == value or float(said) == value, option
    assert ("--bf16" in words) and words[words.index("--model") + 1] == lesson.model


def needs_gb(run, ranks: int) -> float:
    """Predicted memory of a rank: states and activations.

    For transformers' models those of our model of the same shape, and the logits' gradients."""
    _, micro_batch = run.loop.micro_batches(run.parallel.data_parallel(ranks))
    if getattr(run.model, "experts", 0):
        return mixture_gb(run, micro_batch)
    logits = 0
    if isinstance(run.model, HFModelConfig):
        alike = (
            "n_layer",
            "n_head",
            "d_model",
            "vocab_size",
            "max_seq_len",
            "activation_checkpointing",
        )
        shape = {name: getattr(run.model, name) for name in alike}
        run = dataclasses.replace(run, model=ModelConfig(tied=False, **shape))
        logits = 4 * micro_batch * run.loop.seq_len * run.model.vocab_size
    if run.parallel.strategy == "megatron":
        kept = sum(cost.megatron_activation_bytes_by_part(run, ranks).values())
    else:
        kept = cost.activation_bytes(run.model, micro_batch, run.loop.seq_len, run.loop.precision)
    return (sum(cost.held_bytes(run, ranks).values()) + kept + logits) / 1e9


def mixture_gb(run, micro_batch: int) -> float:
    """At most: all states of all experts on a rank, and top-k times a dense model's activations."""
    states = 18 * cost.parameter_count(run.model)
    dense = dataclasses.replace(run.model, experts=0)
    kept = cost.activation_bytes(dense, micro_batch, run.loop.seq_len, run.loop.precision)
    return (states + run.model.top_k * kept) / 1e9


def memory_gb(place, path: str) -> float:
    constraint = options((FOLDER / path).read_text()).get("constraint", "")
    return next(kind.memory_gb for kind in place.node.kinds if kind.constraint == constraint)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize(
    "nodes, weak, strong", [(1, [1], [1]), (4, [1, 2, 4], [1, 2, 4]), (5, [1, 2, 4, 5], [1, 5])]
)
def test_the_scaling_study_has_equal_work_per_rank_or_equal_total_work(
    name, nodes, weak, strong, tmp_path
):
    job = Job(tmp_path, f"{name}/scaling.sbatch", nodes=nodes)
    assert job.finish() == (0, "")
    batches = {}
    for step, training in job.steps():
        ranks = int(step["ntasks"])
        assert training.misfit(ranks) is None
        assert ranks == int(step["nodes"]) * site(name).node.gpus
        kind, count, _ = Path(training.args.save).name.split("-")
        assert int(count) == int(step["nodes"])
        batches[kind, int(count)] = training.args.batch
    assert sorted(batches) == [("strong", n) for n in strong] + [("weak", n) for n in weak]
    assert {batches["weak", n] / n for n in weak} == {batches["weak", 1]}
    assert {batches["strong", n] for n in strong} == {batches["weak", nodes]}
    [summary] = [call for call in job.calls("python") if "aiscale.measure.speed" in call]
    assert summary[-1].startswith(str(tmp_path / "runs/scaling-77/"))


def test_speeds_stand_beside_the_smallest_run_of_their_kind(tmp_path):
    for name, ranks, speeds in (
        ("weak-2-nodes", 8, [1, 1, 1, 300, 500]),
        ("weak-1-nodes", 4, [1, 1, 1, 200, 300]),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"world_size": ranks}))
        lines = [json.dumps({"kind": "train", "tokens_per_s": speed}) for speed in speeds]
        (tmp_path / name / "metrics.jsonl").write_text(
            "\n".join([*lines, json.dumps({"kind": "eval"})])
        )
    small, large = speed.rows([str(tmp_path / name) for name in ("weak-2-nodes", "weak-1-nodes")])
    assert (small["ranks"], small["tokens_per_s"], small["efficiency"]) == (4, 250, 1)
    assert (large["ranks"], large["tokens_per_s"], large["efficiency"]) == (8, 400, 0.8)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("words", [(), ("sub/mine.toml", "--budget", "5")])
def test_a_study_runs_on_the_jobs_node_and_its_file_is_named_after_it(name, words, tmp_path):
    job = Job(tmp_path, f"{name}/study.sbatch", *words)
    assert job.finish() == (0, "")
    [call] = [call for call in job.calls("python") if "study" in call]
    args = _parser("study").parse_args(call[call.index("study") :])
    assert (args.study, args.budget) == (("sub/mine.toml", 5) if words else ("node", None))
    assert args.out == f"{tmp_path}/runs/study-{'mine' if words else 'node'}"


@pytest.mark.parametrize("name", SHIPPED)
def test_a_notebook_runs_in_a_job_by_name_and_with_parameters(name, tmp_path):
    for words in ((), ("08", "-p", "n_steps=20")):
        folder = tmp_path / str(len(words))
        folder.mkdir()
        job = Job(folder, f"{name}/notebook.sbatch", *words)
        assert job.finish() == (0, "")
        [call] = [call for call in job.calls("python") if "notebooks" in call]
        args = _parser("notebooks").parse_args(call[call.index("notebooks") :])
        assert args.names == ["08" if words else "03_ddp"] and args.parameter == list(words[2:])
        assert not list(folder.glob("ipython-*")), "its private folder is left behind"


@pytest.mark.parametrize("name", SHIPPED)
def test_there_is_one_engine_per_gpu(name, tmp_path):
    folder = tmp_path / "engines"
    folder.mkdir()
    job = Job(tmp_path, f"{name}/engines.sbatch", AISCALE_FOLDER=str(folder))
    assert job.finish() == (0, "")
    [engines] = [call for call in job.calls("srun") if "aiscale.lesson.cluster" in call]
    ranks = job.nodes * site(name).node.gpus
    assert f"--ntasks={ranks}" in engines and engines[-3:] == [str(folder), str(ranks), "slurm"]


@pytest.mark.parametrize("is_there", [True, False])
def test_engines_whose_notebook_has_ended_end_their_job(tmp_path, is_there):
    folder = tmp_path / "engines"
    if is_there:
        folder.mkdir()
    (tmp_path / "programs").mkdir()
    for name, line in (
        ("sleep", "exec /bin/sleep 0.05"),
        ("scancel", 'echo "$@" > "$CALLS.cancelled"'),
    ):
        (tmp_path / "programs" / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / "programs" / name).chmod(0o755)
    env = {"AISCALE_FOLDER": str(folder), "ENGINES_LAST": "10" if is_there else "400"}
    Job(tmp_path, "frontier/engines.sbatch", **env).finish()
    told = tmp_path / "calls.cancelled"
    assert (told.read_text() if told.exists() else "") == ("" if is_there else "77\n")


# How they end ------------------------------------------------------------------------------------


def test_the_exit_status_of_training_is_the_jobs(tmp_path):
    job = Job(tmp_path, "frontier/ddp.sbatch", TRAIN_STATUS="3", CHAIN="1")
    assert job.finish()[0] == 3 and ["scontrol", "requeue", "77"] not in job.calls()


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("lesson", ["ddp", "radius_2b"])
def test_a_job_that_stopped_in_time_requeues_itself_only_if_asked(name, lesson, tmp_path):
    for chain in ("", "1"):
        job = Job(tmp_path, f"{name}/{lesson}.sbatch", NOTES="runs/x/00000004 stopped", CHAIN=chain)
        status, errors = job.finish()
        assert status == 0 and (["scontrol", "requeue", "77"] in job.calls()) == bool(chain)
        assert chain or errors == ""


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("lesson", ["ddp", "scaling", "your_own", "engines"])
def test_every_step_ends_when_one_of_its_ranks_fails(name, lesson, tmp_path):
    (tmp_path / "engines").mkdir()
    env = {"AISCALE_FOLDER": str(tmp_path / "engines")}
    if (name, lesson) == ("frontier", "ddp"):
        env["AISCALE_ENVIRONMENT"] = str(tmp_path / "env.tar.gz")  # two steps unpack it
    job = Job(tmp_path, f"{name}/{lesson}.sbatch", **env)
    assert job.finish()[0] == 0
    # Nodes that are looked at each by itself are not ranks of one step.
    steps = [step for step in job.calls("srun") if step[-1] != "--node"]
    assert steps and all("--kill-on-bad-exit=1" in step for step in steps)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("lesson", ["ddp", "your_own", "engines"])
def test_an_environment_without_python_ends_the_job_before_its_ranks_start(name, lesson, tmp_path):
    job = Job(tmp_path, f"{name}/{lesson}.sbatch", AISCALE_ENVIRONMENT=f"{tmp_path}/nowhere")
    status, errors = job.finish()
    assert (
        status
        and not job.calls("srun")
        and errors.endswith("nowhere/bin/python': No such file or directory\n")
    )


def test_restarts_are_capped_and_the_cap_can_be_raised(tmp_path):
    for count, cap, again in (("4", "", True), ("5", "", False), ("5", "6", True)):
        env = {"CHAIN": "1", "SLURM_RESTART_COUNT": count} | ({"RESTARTS": cap} if cap else {})
        job = Job(tmp_path, "frontier/ddp.sbatch", NOTES="runs/x/00000001 stopped", **env)
        status, errors = job.finish()
        assert status == 0 and (["scontrol", "requeue", "77"] in job.calls()) == again
        assert ("restarted 5 times, the most that RESTARTS allows" in errors) == (not again)
        job.calls_file.unlink()
    # by Slurm: nodes fail
    job = Job(tmp_path, "frontier/radius_355m.sbatch", SLURM_RESTART_COUNT="9", CHAIN="1")
    status, errors = job.finish()
    assert status == 1 and "9 restarts, and RESTARTS allows 5" in errors and not job.steps()


@pytest.mark.parametrize("qos", ["gpu_debug", "debug"])
def test_a_qos_that_forbids_chains_is_known_by_the_name_that_jobs_see(qos, tmp_path):
    job = Job(tmp_path, "perlmutter/ddp.sbatch", NOTES="stopped", CHAIN="1", SLURM_JOB_QOS=qos)
    status, errors = job.finish()
    assert status == 0 and ["scontrol", "requeue", "77"] not in job.calls()
    assert f"QOS {qos} forbids chains of jobs" in errors


@pytest.mark.parametrize("folder", ["", "launchers/frontier/"])
def test_a_file_trains_with_a_site_sh_in_the_folder_of_submission_alone(folder, tmp_path):
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    shutil.copy(FOLDER / "frontier/site.sh", tmp_path / folder)
    job = Job(tmp_path, "frontier/ddp.sbatch", AISCALE_SITE_SH="")
    assert job.finish() == (0, "") and len(job.steps()) == 1


def test_without_site_sh_a_job_ends_in_one_line_that_says_what_to_do(tmp_path):
    job = Job(tmp_path, "frontier/ddp.sbatch", AISCALE_SITE_SH="")
    status, (line,) = (told := job.finish())[0], told[1].splitlines()
    assert status == 1 and "export AISCALE_SITE_SH=/path/to/launchers/frontier/site.sh" in line


@pytest.mark.parametrize("name", SHIPPED)
def test_srun_starts_as_many_ranks_and_gpus_as_the_command_line_of_sbatch_asks_for(name, tmp_path):
    given = {"SLURM_NTASKS_PER_NODE": "2", "SLURM_GPUS_PER_NODE": "2"}
    job = Job(tmp_path, f"{name}/fsdp.sbatch", nodes=3, **given)
    assert job.finish() == (0, "")
    [(step, _)] = job.steps()
    assert (step["nodes"], step["ntasks"], step["ntasks-per-node"]) == ("3", "6", "2")
    assert step.get("gpus-per-node", "2") == "2"


@pytest.mark.parametrize(
    "status, notes, over",
    [
        ("0", "stopped", False),
        ("76", "hung", False),
        ("0", "runs/x/00000001", True),
        ("2", "", True),
    ],
)
def test_a_chain_goes_on_after_a_job_that_was_stopped_and_ends_with_the_run(
    status, notes, over, tmp_path
):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/.over-70").write_text("of an earlier chain, whose first job had this id\n")
    for job_id, chain in (("70", "first"), ("71", "70")):
        env = {
            "TRAIN_STATUS": status,
            "NOTES": notes,
            "AISCALE_CHAIN": chain,
            "SLURM_JOB_ID": job_id,
        }
        job = Job(tmp_path, "frontier/ddp.sbatch", **env)
        ended = job.finish()[0]
    assert len(job.steps()) == 2 - over and ended == (int(status) if not over else status != "0")
    assert ("nothing to do: job 70 ended with status" in job.log) == over


@pytest.mark.parametrize(
    "nodes, most, wish, looks, ends",
    [
        (2, "", "", True, 0),
        (2, "0", "", False, 0),
        (2, "", "strict", True, 1),
        (17, "", "", False, 0),
        (17, "32", "", True, 0),
    ],
)
def test_ranks_look_at_few_nodes_before_they_train_and_only_strict_ends_the_job(
    nodes, most, wish, looks, ends, tmp_path
):
    env = {"DOCTOR_STATUS": "1", "DOCTOR_NODES": most, "AISCALE_DOCTOR": wish}
    job = Job(tmp_path, "frontier/ddp.sbatch", nodes=nodes, **env)
    assert job.finish()[0] == ends
    assert any("--patience" in call and "doctor" in call for call in job.calls("srun")) == looks
    assert len(job.steps()) == 1 - ends


def alone(job: Job) -> int:
    """How often each node was looked at by itself."""
    return sum(call[-1] == "--node" for call in job.calls("srun"))


@pytest.mark.parametrize(
    ("wish", "bad", "ends", "says"),
    [
        ("strict", "", 0, ""),
        ("", "node2", 1, "do without: sbatch --exclude=node2"),
        ("lenient", "node2", 0, "do without: sbatch --exclude=node2"),
        ("", "node1 node3", 1, "nodes: more than half of the nodes: look at what nodes share"),
        ("lenient", "node1 node3", 0, "nodes: not ready: node1,node3"),
    ],
)
def test_a_node_that_is_not_ready_by_itself_is_named_and_ends_the_job(
    wish, bad, ends, says, tmp_path
):
    # A step's lines may have its rank before them.
    env = {"HOSTS": "node1 node2 node3", "BAD": bad, "AISCALE_DOCTOR": wish, "SLURM_LABELIO": "1"}
    job = Job(tmp_path, "frontier/ddp.sbatch", nodes=3, **env)
    assert job.finish()[0] == ends
    assert says in job.log and alone(job) == 1 and len(job.steps()) == 1 - ends


def test_a_chain_that_trains_with_a_bad_node_all_the_same_ends_with_its_run(tmp_path):
    env = {"HOSTS": "node1 node2 node3", "BAD": "node2", "AISCALE_DOCTOR": "lenient"}
    job = Job(tmp_path, "frontier/ddp.sbatch", nodes=3, AISCALE_CHAIN="first", **env)
    assert job.finish()[0] == 0 and len(job.steps()) == 1
    assert (tmp_path / "runs/.over-77").read_text() == "job 77 ended with status 0\n"


def test_without_the_doctor_nobody_looks(tmp_path):
    job = Job(tmp_path, "frontier/ddp.sbatch", nodes=3, AISCALE_DOCTOR="off")
    assert job.finish()[0] == 0 and alone(job) == 0 and len(job.steps()) == 1


@pytest.mark.parametrize("chain", [{"AISCALE_CHAIN": "first"}, {"CHAIN": "1"}])
def test_a_chains_next_job_does_without_a_node_that_was_not_ready(chain, tmp_path):
    env = {"HOSTS": "node1 node2 node3", "BAD": "node2", "WAITING": "78 node9\n79 (null)"}
    job = Job(tmp_path, "frontier/ddp.sbatch", nodes=3, **env, **chain)
    assert job.finish()[0] == 1 and job.steps() == []
    assert [call[2:] for call in job.calls("scontrol") if call[1] == "update"] == [
        ["JobId=78", "ExcNodeList=node2,node9"],
        ["JobId=79", "ExcNodeList=node2"],
    ]
    assert ["scontrol", "requeue", "77"] in job.calls() or "AISCALE_CHAIN" in chain
    assert not (tmp_path / "runs/.over-77").exists(), "the chain goes on"


def test_a_chains_next_job_does_without_the_nodes_for_which_ranks_waited(tmp_path):
    env = {"NOTES": "hung bad:node3 bad:node1", "TRAIN_STATUS": "76", "AISCALE_CHAIN": "first"}
    job = Job(tmp_path, "frontier/ddp.sbatch", nodes=4, **env)
    assert job.finish()[0] == 76
    assert ["scontrol", "update", "JobId=78", "ExcNodeList=node1,node3"] in job.calls()


@pytest.mark.parametrize(
    ("nodes", "bad", "left_out"), [(2, 1, True), (3, 2, False), (16, 2, True), (16, 3, False)]
)
def test_a_chain_does_without_few_nodes_only(nodes, bad, left_out, tmp_path):
    """Many at once are rather a fault of the program."""
    notes = " ".join(["hung", *(f"bad:node{number}" for number in range(bad))])
    env = {"NOTES": notes, "TRAIN_STATUS": "76", "AISCALE_CHAIN": "first"}
    job = Job(tmp_path, "frontier/ddp.sbatch", nodes=nodes, **env)
    assert job.finish()[0] == 76
    assert any("update" in call for call in job.calls("scontrol")) == left_out
    assert (f"{bad} of {nodes} nodes failed" in job.log) == (not left_out)


def test_a_node_that_cannot_unpack_is_left_out_by_the_next_job(tmp_path):
    """The step on each node notes it; here by hand, with the words that srun would start there."""
    env = {"AISCALE_ENVIRONMENT": str(tmp_path / "env.tar.gz"), "AISCALE_CHAIN": "first"}
    job = Job(tmp_path, "frontier/ddp.sbatch", nodes=3, **env)
    assert job.finish()[0] == 0
    [step] = [call for call in job.calls("srun") if "unpack" in call]
    note = tmp_path / "note"
    there = {"SLURMD_NODENAME": "node2", "AISCALE_NOTE_SAVED": str(note), "PATH": "/usr/bin:/bin"}
    command = step[step.index("bash") :]
    done = subprocess.run([*command[:-1], str(tmp_path / "no")], env=there, capture_output=True)
    assert done.returncode == 1 and b"unpack: node2 failed" in done.stderr
    assert note.read_text() == "stopped\nbad node2\n"


@pytest.mark.parametrize("name, local", [("frontier", "0"), ("perlmutter", "2")])
def test_your_own_script_gets_torchruns_variables_and_nothing_of_the_kit(name, local, tmp_path):
    job = Job(tmp_path, f"{name}/your_own.sbatch", "mine.py", "--epochs", "3")
    assert job.finish() == (0, "")
    [step] = job.calls("srun")
    command = step[step.index("bash") :]
    assert command[-3:] == ["mine.py", "--epochs", "3"] and not job.calls("python")
    slurm = {
        "SLURM_PROCID": "6",
        "SLURM_LOCALID": "2",
        "SLURM_NTASKS": "8",
        "SLURM_GPUS_ON_NODE": "4",
        "PATH": f"{tmp_path}:/usr/bin:/bin",
    }
    (tmp_path / "python").write_text(
        '#!/bin/bash\necho "$RANK $LOCAL_RANK $WORLD_SIZE $CUDA_VISIBLE_DEVICES $*"\n'
    )
    (tmp_path / "python").chmod(0o755)
    done = subprocess.run(command, env=slurm, capture_output=True, text=True)
    order = "3,2,1,0" if name == "perlmutter" else ""
    assert done.stdout == f"6 {local} 8 {order} mine.py --epochs 3\n"
    text = (FOLDER / name / "your_own.sbatch").read_text()
    assert "aiscale" not in re.sub(r"(?m)^#.*|AISCALE_(ENVIRONMENT|SITE_SH)", "", text)


def test_the_readmes_commands_parse_and_its_files_exist():
    text = (FOLDER / "README.md").read_text()
    commands = {command for command in re.findall(r"`(?:\.venv/bin/)?(aiscale [^`\n]+)`", text)}
    assert len(commands) >= 6
    for command in commands:
        words = shlex.split(command)[1:]
        _parser(words[0]).parse_args(words)
    assert {name for name in re.findall(r"`(\w+)\.sbatch`", text)} == set(LESSONS)
    for file in re.findall(r"(?:frontier|perlmutter)/\w+\.sbatch", text):
        assert (FOLDER / file).exists()
    for file in re.findall(r"`(src/[\w./]+)`", text):
        assert (ROOT / file).exists()


# Profiles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, told",
    [
        (("gpus = 4", "gpu_count = 4"), "unknown key node.gpu_count: did you mean"),
        (("gpus = 4", 'gpus = "four"'), "node.gpus is 'four': it must be a whole number"),
        (('srun = "--cpus-per-task=8 --gpus-per-node=4"', ""), "srun is missing"),
        (
            ('default_partition = "gpu"', 'default_partition = "gpus"'),
            "partition gpus is not among",
        ),
        (('name = "generic"', "name = "), "is not TOML"),
        (
            ('source = "slurm" }]', 'constraint = "a100", source = "slurm" }]'),
            "the constraint a100, which scheduler",
        ),
    ],
)
def test_a_bad_profile_is_refused_in_one_line(change, told, tmp_path, capsys):
    text = (ROOT / "src/aiscale/site/profiles/generic.toml").read_text()
    assert change[0] in text
    (tmp_path / "mine.toml").write_text(text.replace(*change))
    assert (
        main(["launchers", "--site", str(tmp_path / "mine.toml"), "--out", str(tmp_path / "out")])
        == 2
    )
    errors = capsys.readouterr().err
    assert told in errors and "mine.toml" in errors and len(errors.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_custom_profile_is_rendered(tmp_path):
    text = (
        (ROOT / "src/aiscale/site/profiles/generic.toml")
        .read_text()
        .replace('name = "generic"', 'name = "mine"')
    )
    (tmp_path / "mine.toml").write_text(text.replace("memory_gb = 80", "memory_gb = 48"))
    files = render_all(load(tmp_path / "mine.toml"))
    assert "ddp.sbatch" in files and "3d_175b.sbatch" not in files, "GPUs of 48 GB do not hold it"
    assert options(files["ddp.sbatch"])["partition"] == "gpu"
