"""Shipped launchers train to the end, unmodified, under a real Slurm, with the losses without it.

They run on two virtual nodes of each site (launchers/rehearsal), one process per rank, with a tiny
model by options behind the file's name. The environment that a launcher activates belongs to the
test: its `python` runs this one, after recording where it was started and with which variables.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from aiscale.cli import main
from aiscale.measure import study
from aiscale.train.export import hugging_face_tokenizer
from aiscale.train.prepare import learn
from centre import Call, Cluster
from ranks import forked, wait_until
from rehearsal import settings as needs
from rehearsal.settings import user_name

ROOT = Path(__file__).parents[1]
# each starts up to 32 Pythons, which takes minutes on a busy machine
pytestmark = [pytest.mark.slurm, pytest.mark.extended, pytest.mark.timeout(1800)]

TEXT = str(ROOT / "CONTRIBUTING.md")
#: What wins over a launcher's own options.
TINY = "--model tiny --length 16 --batch 16 --micro-batch 1 --steps 3 --warm-up 1"
TINY += " --held-out 0.1 --evaluate-every 2 --evaluate-batches 1"

#: the environment's python; the launcher's own process has no SLURM_STEP_ID
NOTING = f"""#!/bin/sh
echo "$SLURM_STEP_ID $SLURM_PROCID $SLURM_LOCALID $(hostname)" \\
  "cuda=$CUDA_VISIBLE_DEVICES rocr=$ROCR_VISIBLE_DEVICES" \\
  "master=$MASTER_ADDR from=$(dirname "$0")" >> "$SEATS"
exec {shlex.quote(sys.executable)} "$@"
"""

#: replaces it where only the job's end matters: all ranks but the first are frozen, and woken only
#: to be killed
FROZEN = """#!/bin/bash
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || exit 0
[ "$SLURM_PROCID" = 0 ] || { kill -STOP $$; exit 143; }
printf '%s\\n' runs/ddp/00000001 hung > "$AISCALE_NOTE_SAVED"
sleep 1
exit 76
"""


#: replaces it where only nodes matter: on node2 nobody says that the node is ready
NODE_2_IS_BAD = """#!/bin/bash
case "$*" in
  *"doctor --node"*) [ "$SLURMD_NODENAME" = node2 ] || echo "ready $SLURMD_NODENAME" ;;
  *aiscale.train.*) echo "trains on $SLURMD_NODENAME" ;;
esac
"""


@dataclass
class Ended:
    said: str  #: its output
    calls: list[Call]
    seats: list[list[str]]  #: one line per rank that trained, in order, as NOTING writes them
    words: list[str]  #: srun's words of the step that trained

    def asked(self, program: str) -> list[tuple[str, ...]]:
        return [call.args for call in self.calls if call.program == program]


@pytest.fixture
def place(place):
    """A folder that all virtual nodes see, with the environment that launchers activate."""
    programs = place / ".venv/bin"
    programs.mkdir(parents=True)
    (programs / "python").write_text(NOTING)
    (programs / "python").chmod(0o755)
    return place


def packed(place: Path) -> Path:
    path = place / ".venv.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(place / ".venv/bin", arcname="bin")
    return path


def launched(
    nodes: Cluster, lesson: str, place: Path, more: str = "", *, sbatch=(), env=None, folder=None
) -> Ended:
    """Submit a site's unmodified launcher with a tiny model, and wait for it to complete."""
    path = (folder or ROOT / "launchers" / nodes.settings.site.name) / f"{lesson}.sbatch"
    words = [*TINY.split(), *more.split(), "--text", TEXT]
    env = {"SEATS": str(place / "seats"), **(env or {})}
    before = len(nodes.calls())
    job = nodes.submit(path, "--nodes=2", "--time=60", *sbatch, args=words, cwd=place, env=env)
    state = nodes.wait(job, timeout_s=900)
    said = (place / f"{lesson}-{job}.out").read_text()
    assert state == "COMPLETED", said
    assert re.search(r"^ *\d+: (yes|no): ", said, re.M), (
        "the doctor has looked; on a busy machine it may say no"
    )
    calls = nodes.calls()[before:]
    [train] = [
        call.args
        for call in calls
        if call.program == "srun" and "aiscale.train." in " ".join(call.args)
    ]
    lines = (place / "seats").read_text().splitlines()
    # of ranks, not of the batch script
    seats = [line.split() for line in lines if not line.startswith(" ")]
    last = max(int(words[0]) for words in seats)
    ranks = sorted(
        (words for words in seats if int(words[0]) == last), key=lambda words: int(words[1])
    )
    return Ended(said, calls, ranks, [*train])


def seats_of(ended: Ended, per_node: int, **told: str | list[str]) -> None:
    """Check that every rank is on its node and has its site's variables.
    `told`: one value, or one per local rank."""
    assert len(ended.seats) == 2 * per_node
    for rank, (_, number, local, node, *words) in enumerate(ended.seats):
        assert [number, local, node] == [
            str(rank),
            str(rank % per_node),
            f"node{rank // per_node + 1}",
        ]
        found = dict(word.split("=") for word in words)
        for key, value in told.items():
            assert found[key] == (value[rank % per_node] if isinstance(value, list) else value), (
                rank,
                words,
            )


def losses_equal_those_without_slurm(ended: Ended, ranks: int, place: Path) -> None:
    module, *words = ended.words[ended.words.index("-m") + 1 :]
    at = words.index("--save") + 1
    there, words[at] = Path(words[at]), str(place / "without")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    trainer = module.removeprefix("aiscale.train.")
    done = forked(
        ["-m", "aiscale", "train", trainer, *words, f"--nproc={ranks}"], env=env, timeout=600
    )
    assert done.returncode == 0, done.stderr
    with_slurm, without = losses(there), losses(place / "without")
    assert len(with_slurm) == 5, "three steps and two evaluations"
    assert with_slurm == without


def losses(run: Path) -> list[tuple[str, int, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["kind"], row["step"], row["loss"]) for row in rows]


def test_ddp_at_frontier_from_an_environment_that_sbcast_packs_onto_each_nodes_nvme(
    frontier, place
):
    archive = packed(place)
    env = {"AISCALE_ENVIRONMENT": str(archive)}
    ended = launched(frontier, "ddp", place, sbatch=["--constraint=nvme"], env=env)
    fast = f"/mnt/bb/{user_name()}/env"
    assert ended.asked("sbcast") == [("--preserve", "--force", str(archive), f"{fast}.tar.gz")]
    modules = [word for args in ended.asked("module") if args[0] == "load" for word in args[1:]]
    assert modules.index("rocm/7.1.1") < modules.index("rccl-net-plugin"), (
        "the plugin must find rocm"
    )
    assert {call.node for call in ended.calls if call.program == "conda-unpack"} == {
        "node1",
        "node2",
    }
    seats_of(
        ended,
        8,
        rocr=list("45236701"),  # --gpu-bind=closest, OLCF's guide
        master="10.77.0.1",
        **{"from": f"{fast}/bin"},
    )
    losses_equal_those_without_slurm(ended, 16, place)


def test_zero_at_perlmutter_in_a_container(perlmutter, place):
    env = {"AISCALE_ENVIRONMENT": "container", "PATH": f"{place}/.venv/bin:{needs.search_path()}"}
    ended = launched(perlmutter, "zero", place, env=env)
    started = [args for args in ended.asked("shifter") if "aiscale.train.zero" in args]
    assert len(started) == 8 and all(args[1] == "python" for args in started)
    assert ended.asked("module") == [("reset",)]
    seats_of(ended, 4, cuda="3,2,1,0", master="node1")
    losses_equal_those_without_slurm(ended, 8, place)


PARTS = "--tp 2 --pp 2"
MASKS = "--dense-until 1 --interval 2"
LESSONS = {
    "fsdp": "",
    "3d_22b": PARTS,
    "3d_175b": PARTS,
    "3d_175b_256": PARTS,
    "radius_355m": MASKS,
    "radius_2b": MASKS,
}


@pytest.mark.parametrize("lesson, more", LESSONS.items())
def test_other_strategies_at_perlmutter_with_the_sites_module(perlmutter, place, lesson, more):
    ended = launched(perlmutter, lesson, place, more)
    [reset, (load, module)] = ended.asked("module")
    assert reset == ("reset",) and load == "load" and module.startswith("pytorch")
    train = [word for word in ended.words if word.startswith("--")]
    assert {"--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=32", "--gpus-per-node=4"} <= set(
        train
    )
    seats_of(ended, 4, cuda="3,2,1,0", master="node1", **{"from": f"{place}/.venv/bin"})
    losses_equal_those_without_slurm(ended, 8, place)


@pytest.mark.parametrize("size", "sml")
def test_forge_at_frontier(frontier, place, size):
    env = {"AISCALE_ENVIRONMENT": str(place / ".venv")}
    ended = launched(frontier, f"forge_{size}", place, "" if size == "s" else "--tp 2", env=env)
    losses_equal_those_without_slurm(ended, 16, place)


def test_hugging_faces_trainer_at_perlmutter_prints_the_losses_that_it_prints_by_torchrun(
    perlmutter, place
):
    from transformers import GPT2Config, GPT2LMHeadModel  # seconds, of which other tests need none

    (place / "my_texts").write_text(text := (ROOT / "README.md").read_text())
    tokenizer = hugging_face_tokenizer(learn("bpe", [text], bpe_vocab_size=300))
    shape = {"n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(
        GPT2Config(**shape, n_embd=16, n_positions=64, vocab_size=len(tokenizer))
    )
    for part in (tokenizer, model):
        part.save_pretrained(place / "models/gpt2-xl")
    words = [
        str(ROOT / "launchers/hf_trainer.py"),
        "--window=64",
        "--max_steps=3",
        "--per_device_train_batch_size=1",
    ]
    words += ["--use_cpu", "--ddp_backend=gloo", "--bf16=false"]
    path = ROOT / "launchers/perlmutter/hf_trainer.sbatch"
    env = {"SEATS": "/dev/null", "OMP_NUM_THREADS": "1"}
    job = perlmutter.submit(path, "--nodes=2", "--time=60", args=words, cwd=place, env=env)
    state, said = perlmutter.wait(job, timeout_s=900), (place / f"hf_trainer-{job}.out").read_text()
    assert state == "COMPLETED" and "trained as DistributedDataParallel" in said, said
    command = ["-m", "torch.distributed.run", "--nproc-per-node=8", *words]
    env = {**os.environ, **env}
    without = forked(command, cwd=place, env=env, timeout=600).stdout
    with_slurm, alone = (re.findall(r"'loss': '?([\d.]+)", text) for text in (said, without))
    assert len(with_slurm) == 3 and with_slurm == alone


def from_scratch(nodes: Cluster, place: Path, *words: str, sbatch=(), env=None) -> str:
    """What the launcher of the GPT from nothing says, submitted on two nodes."""
    path = ROOT / "launchers" / nodes.settings.site.name / "from_scratch.sbatch"
    # MPICH from PyPI speaks PMI-2; a site's srun speaks by itself what the site's MPI understands.
    env = {"SEATS": str(place / "seats"), "SLURM_MPI_TYPE": "pmi2", **(env or {})}
    args = ["tiny", "--batch=16", "--steps=2", *words]
    job = nodes.submit(path, "--time=60", *sbatch, args=args, cwd=place, env=env)
    state, said = nodes.wait(job, timeout_s=900), (place / f"from_scratch-{job}.out").read_text()
    assert state == "COMPLETED", said
    return said


def losses_of_from_scratch(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step +\d+  loss (\S+)", said)]


@pytest.fixture
def alone() -> list[float]:
    """The losses of stage 0."""
    words = ["-m", "from_scratch.train", "tiny", "--batch=16", "--steps=2"]
    done = forked(words, cwd=ROOT / "workshop", timeout=300)
    assert done.returncode == 0, done.stderr
    return losses_of_from_scratch(done.stdout)


@pytest.mark.parametrize("name, ranks", [("frontier", 16), ("perlmutter", 8)])
def test_a_gpt_from_nothing_trains_by_mpi_on_two_nodes_and_goes_on(
    name, ranks, place, alone, request
):
    nodes = request.getfixturevalue(name)
    env = {"AISCALE_ENVIRONMENT": str(place / ".venv")}
    said = from_scratch(nodes, place, env=env)
    assert losses_of_from_scratch(said) == pytest.approx(alone, abs=1e-5)
    seats = [line.split() for line in (place / "seats").read_text().splitlines()]
    assert {int(rank) for _, rank, *_ in seats} == set(range(ranks))
    assert {host for _, _, _, host, *_ in seats} == {"node1", "node2"}
    # the checkpoint of the first job has its two steps
    again = from_scratch(nodes, place, "--steps=3", env=env)
    assert len(losses_of_from_scratch(again)) == 1 and "step    3" in again


def test_a_gpt_from_nothing_trains_by_mpi_on_gpus_that_numba_simulates(perlmutter, place, alone):
    one_a_node = ["--ntasks-per-node=1", "--gpus-per-node=1"]
    simulated = {"NUMBA_ENABLE_CUDASIM": "1"}
    said = from_scratch(perlmutter, place, "--device=gpu", sbatch=one_a_node, env=simulated)
    assert losses_of_from_scratch(said) == pytest.approx(alone, abs=1e-5)
    assert "moved: " in said


def test_srun_that_tells_mpi_nothing_is_refused_in_one_line(perlmutter, place):
    path = ROOT / "launchers/perlmutter/from_scratch.sbatch"
    env = {"SEATS": "/dev/null", "SLURM_MPI_TYPE": "none"}
    job = perlmutter.submit(path, "--time=60", args=["tiny"], cwd=place, env=env)
    assert perlmutter.wait(job) == "FAILED"
    said = (place / f"from_scratch-{job}.out").read_text()
    assert "srun started 8 processes, but MPI sees one" in said and "Traceback" not in said


def test_refused_settings_are_told_although_srun_ends_all_ranks_with_the_first(perlmutter, place):
    # rank 0 is the last to refuse
    late = NOTING.replace("exec", '[ "$SLURM_PROCID" != 0 ] || sleep 3\nexec')
    (place / ".venv/bin/python").write_text(late)
    path, words = ROOT / "launchers/perlmutter/ddp.sbatch", ["--nodes=2", "--time=60"]
    job = perlmutter.submit(path, *words, args=["--batch", "481"], cwd=place)
    assert perlmutter.wait(job) == "FAILED"
    assert (
        "0: aiscale: --batch is 481: it must be a multiple"
        in (place / f"ddp-{job}.out").read_text()
    )


def test_scaling_and_study_at_perlmutter_store_their_rows(perlmutter, place):
    text = 'name = "two"\nrepeats = 1\n[base]\nsize = "2x64"\ndata_kib = 4\nstrategy = "ddp"\n'
    text += "[vary]\nranks = [1, 2]\n"
    (place / "two.toml").write_text(text)
    words = "--model tiny --length 16 --steps 3".split()
    for lesson, nodes, args in (("scaling", 2, words), ("study", 1, [f"{place}/two.toml"])):
        path = ROOT / f"launchers/perlmutter/{lesson}.sbatch"
        job = perlmutter.submit(path, f"--nodes={nodes}", "--time=60", args=args, cwd=place)
        assert perlmutter.wait(job, timeout_s=900) == "COMPLETED", (
            place / f"{lesson}-{job}.out"
        ).read_text()
    said = next(place.glob("scaling-*.out")).read_text()
    assert len(re.findall(r"^(?:weak|strong)-[12]-nodes .*%$", said, re.M)) == 4, said
    assert {row["status"] for row in study.load(place / "runs/study-two")} == {"ok"}


@pytest.mark.parametrize("name", ["lumi", "odo"])
def test_ddp_at_centres_whose_files_are_rendered_on_demand(place, name, capsys):
    assert main(["launchers", "--site", name, "--out", str(place)]) == 0
    with Cluster(site=name, nodes=2) as nodes:
        nodes.accepts(place / name)
        env = {"AISCALE_ENVIRONMENT": str(place / ".venv")}
        ended = launched(nodes, "ddp", place, env=env, folder=place / name)
    contained = [args for args in ended.asked("singularity") if "aiscale.train.ddp" in args]
    assert len(contained) == (16 if name == "lumi" else 0)
    assert all(args[1].endswith(".sif") for args in contained)
    closest = list("45236701") if name == "odo" else ["0,1,2,3,4,5,6,7"] * 8
    seats_of(ended, 8, rocr=closest, master="10.77.0.1" if name == "odo" else "node1")
    losses_equal_those_without_slurm(ended, 16, place)


def test_a_job_resumes_after_slurm_killed_its_frozen_ranks(perlmutter, place):
    (place / ".venv/bin/python").write_text(FROZEN)
    path = ROOT / "launchers/perlmutter/ddp.sbatch"
    job = perlmutter.submit(
        path,
        "--nodes=1",
        "--time=60",
        "--requeue",
        cwd=place,
        env={"CHAIN": "1", "AISCALE_DOCTOR": "off"},
    )
    assert perlmutter.wait(job) == "COMPLETED", (place / f"ddp-{job}.out").read_text()
    shown = perlmutter.login(
        ["scontrol", "--oneliner", "show", "job", job], capture_output=True
    ).stdout
    assert "Restarts=1" in shown


@pytest.mark.parametrize("requeues", [False, True])
def test_a_chains_next_job_does_without_a_node_that_is_not_ready(requeues, place):
    (place / ".venv/bin/python").write_text(NODE_2_IS_BAD)
    path = ROOT / "launchers/perlmutter/ddp.sbatch"
    words = ("--nodes=2", "--time=60")
    with Cluster(site="perlmutter", nodes=3) as nodes:
        if requeues:
            jobs = [nodes.submit(path, *words, "--requeue", cwd=place, env={"CHAIN": "1"})]
        else:
            first = nodes.submit(path, *words, "--hold", cwd=place, env={"AISCALE_CHAIN": "first"})
            after = f"--dependency=afterany:{first}"
            second = nodes.submit(path, *words, after, cwd=place, env={"AISCALE_CHAIN": first})
            nodes.login(["scontrol", "release", first], check=True)
            jobs = [first, second]
        ends = [nodes.wait(job, timeout_s=600) for job in jobs]
    said = "".join((place / f"ddp-{job}.out").read_text() for job in jobs)
    assert ends == ["COMPLETED"] if requeues else ends == ["FAILED", "COMPLETED"], said
    assert "nodes: not ready: node2" in said
    assert f"chain: job {jobs[-1]} will do without node2" in said
    trained = sorted(re.findall(r"trains on (\S+)", said))
    assert trained == ["node1"] * 4 + ["node3"] * 4, said


def test_the_page_from_lesson_to_run_leads_to_a_chain_of_three_jobs_that_ends_by_itself(
    perlmutter, place
):
    page = (ROOT / "launchers/from_lesson_to_run.md").read_text()
    commands = re.search(r"## Rehearse it first.*?```\n(.*?)```", page, re.S)[1]
    (place / "launchers").symlink_to(ROOT / "launchers")
    done = perlmutter.login(["bash", "-ec", commands], cwd=place, capture_output=True)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.split()[-3:]
    metrics = place / "runs/mine/metrics.jsonl"
    wait_until(
        lambda: metrics.exists() and '"train"' in metrics.read_text(), 400, "the first job trains"
    )
    # Slurm itself sends USR1
    perlmutter.login(["scontrol", "update", f"job={first}", "timelimit=5"], check=True)
    ends = [perlmutter.wait(job, timeout_s=600) for job in (first, second, third)]
    assert ends == ["COMPLETED"] * 3
    stopped, _, last = ((place / f"mine-{job}.out").read_text() for job in (first, second, third))
    assert (
        "chain: stopped" in stopped and f"nothing to do: job {second} ended with status 0" in last
    )
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(600))
