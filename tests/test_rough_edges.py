"""Every command answers bad circumstances with one line and an exit status, and leaves nothing half-written.

TABLE is command x circumstance -> how to bring it about and what must be said, or why it cannot happen. A command that
is missing from it fails a test. Signals need real processes, and are in the extended tier.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from aiscale import cli
from ranks import processes_with, run_ranks, wait_until

ROOT = Path(__file__).parents[1]
extended = pytest.mark.extended
TINY = ["--quiet", "--set", "model.n_layer=1", "--set", "loop.device=cpu"]


@dataclass(frozen=True)
class Case:
    """A command line (its words may hold {folder}, {file}, {run}, ...) and what follows."""

    words: str
    said: str  #: a regular expression: values, the rule, what to do
    status: int = 2
    slow: bool = False  #: for the extended tier


FILE, FULL = r"cannot be written \(Not a directory\): name another", r"free some space, or name another"
PRINTS = r"standard output, cannot be written \(No space left on device\): free some space"
HELP = r"--help lists what there is"
WRITES_NOTHING = "it writes nothing"
PRINTS_ONLY = "it writes to standard output and to temporary files"
READS_NOTHING = "it reads no file of the user's"
CIRCUMSTANCES = ("unwritable output", "full disk", "missing input", "truncated input", "wrong type")
TABLE: dict[str, tuple[Case | str, ...]] = {
    "train": (
        Case("--runs-dir {file}/runs", rf"{FILE} folder with --runs-dir"),
        Case("--runs-dir {full}/runs", rf"{FULL} folder with --runs-dir"),
        Case("--config {folder}/none.json", r"--config .*none.json cannot be read as JSON: .*No such file"),
        Case("--config {half}/run.json", r"--config .*run.json cannot be read as JSON: "),
        Case("--nproc two", r"--nproc is 'two': it must be a whole number"),
    ),
    "generate": (
        WRITES_NOTHING,
        Case("{run} --tokens 1 >full", PRINTS),
        Case("{folder}/none", r"none is not a run folder: .*; name one like runs/laptop"),
        Case("{half}", r"half is not a run folder: it has no readable run.json"),
        Case("{run} --tokens many", r"--tokens is 'many': it must be a whole number"),
    ),
    "verify": (
        PRINTS_ONLY,
        Case("--list >full", PRINTS),
        Case("zero1x2", r"unknown rung 'zero1x2': did you mean zero1-x2\?"),
        READS_NOTHING,
        Case("--lst", r"unknown option --lst: did you mean --list\?"),
    ),
    "bench": (
        Case("study quick --out {file}/s.csv", rf"{FILE} folder with --out"),
        Case("study quick --out {full}/s.csv", rf"{FULL} folder with --out"),
        Case(
            "study {folder}/none.toml",
            r"none.toml cannot be read \(No such file.*\): name a TOML file, or laptop",
        ),
        Case("report {half}/rows.csv", r"rows.csv cannot be read as a study's CSV .*: name a file of aiscale bench"),
        Case("study quick --budget few", r"--budget is 'few': it must be a number"),
    ),
    "doctor": (
        Case("--nproc 1 >in /proc", r"this folder .*No such file.*|aiscale train --runs-dir DIR", status=1, slow=True),
        Case("--nproc 1 >in {full}", r"free some space", status=1, slow=True),
        READS_NOTHING,
        READS_NOTHING,
        Case("--device gpu", r"--device is 'gpu': did you mean cpu\?"),
    ),
    "data prepare": (
        Case("{text} --tokenizer byte --out {file}/corpus", rf"{FILE} folder with --out"),
        Case("{text} --tokenizer byte --out {full}/corpus", rf"{FULL} folder with --out"),
        Case("{folder}/none --out {folder}/corpus", r"corpus '.*none' does not exist: name a text file, a folder"),
        Case(
            "{half}/a.txt --tokenizer {half}/run.json --out {folder}/c",
            r"run.json is not a tokenizer, or only a part of one: give a whole",
        ),
        Case("{text} --vocab-size big", r"--vocab-size is 'big': it must be a whole number"),
    ),
    "data show": (
        WRITES_NOTHING,
        Case("{corpus} >full", PRINTS),
        Case("{folder}/none", r"there is no folder .*none: name one that `aiscale data prepare` has made"),
        Case("{cut}", r"shard .*00000.tokens is truncated: .* bytes, the file has \d+: delete its folder and prepare"),
        Case("{corpus} and more", rf"'and' is one word too many: aiscale data show {HELP}"),
    ),
    "evaluate": (
        WRITES_NOTHING,
        "its table comes after a minute of evaluation",
        Case("{folder}/none", r"none is neither a run folder \(run.json\) nor a Hugging Face folder \(config.json\)"),
        Case(
            "{torn} --tasks aiscale_rolling", r"torn cannot be read \(SafetensorError: .*\): copy the whole", slow=True
        ),
        Case("{run} --limit few", r"--limit is 'few': it must be a whole number"),
    ),
    "export": (
        Case("{run} {file}/mine", rf"{FILE} folder$"),
        Case("{run} {full}/mine", rf"{FULL} folder$"),
        Case("{folder}/none {folder}/mine", r"none is not a run folder"),
        Case("{damaged} {folder}/mine", r"step_00000002 is damaged \(.*\): delete it to use the one before"),
        Case("{run}", rf"FOLDER is missing: aiscale export {HELP}"),
    ),
    "kernel install": (
        Case("--site none --prefix {file}/k", rf"{FILE} folder with --prefix, or --user"),
        Case("--site none --prefix {full}/k", rf"{FULL} folder with --prefix, or --user"),
        Case("--site frontir --prefix {folder}/k", r"unknown site 'frontir': did you mean frontier\?"),
        Case("--site {half}/site.toml --prefix {folder}/k", r"site.toml"),
        Case("--nmae x", r"unknown option --nmae: did you mean --name\?"),
    ),
    "launchers": (
        Case("--site generic --out {file}/l", rf"{FILE} folder with --out"),
        Case("--site generic --out {full}/l", rf"{FULL} folder with --out"),
        Case("--site frontir --out {folder}/l", r"unknown site 'frontir': did you mean frontier\?"),
        Case("--site {half}/site.toml --out {folder}/l", r"site.toml"),
        Case("--chekc", r"unknown option --chekc: did you mean --check\?"),
    ),
    "plan": (
        Case("--page {file}/p", rf"{FILE} folder with --page"),
        Case("--page {full}/p", rf"{FULL} folder with --page"),
        Case("--rows {folder}/none.csv", r"--rows .*none.csv cannot be read: .*No such file"),
        Case("--rows {half}/rows.csv", r"--rows .*rows.csv cannot be read: .*unexpected end of data"),
        Case("--model gpt2 --machine frontier --nodes two", r"--nodes is 'two': it must be a whole number"),
    ),
    "submit": (
        WRITES_NOTHING,
        "its report goes to standard error",
        Case("{folder}/none.sbatch", r"none.sbatch is not a file: name a launcher, such as"),
        Case("--site {half}/site.toml {launcher}", r"site.toml"),
        Case("--dyr-run {launcher}", r"unknown option --dyr-run: did you mean --dry-run\?"),
    ),
    "rehearse": (
        PRINTS_ONLY,
        "it prints what its command prints",
        Case("--site frontir -- true", r"unknown site 'frontir': did you mean frontier\?"),
        Case("--site {half}/site.toml -- true", r"site.toml"),
        Case("--nodes two -- true", r"--nodes is 'two': it must be a whole number"),
    ),
    "class reset": (
        Case("{file}/seat --yes", rf"{FILE} folder$"),
        Case("{full} --yes", rf"{FULL} folder$"),
        Case("{folder} --from {folder}/none.tar.gz --yes", r"--from .*none.tar.gz cannot be read: there is no such"),
        Case("{folder} --from {half}/class.tar.gz --yes", r"class.tar.gz is not an archive, or only a part of one \("),
        Case("--form x", r"unknown option --form: did you mean --from\?"),
    ),
    "class price": (
        WRITES_NOTHING,
        Case("30 >full", PRINTS),
        Case("30 --site frontir", r"unknown site 'frontir': did you mean frontier\?"),
        Case("30 --site {half}/site.toml", r"site.toml"),
        Case("thirty", r"SEATS is 'thirty': it must be a whole number"),
    ),
    "models fetch": (
        Case("a/b --out {file}/m", rf"{FILE} folder with --out"),
        Case("a/b --out {full}/m", rf"{FULL} folder with --out"),
        READS_NOTHING,
        READS_NOTHING,
        Case("", rf"NAME is missing: aiscale models fetch {HELP}"),
    ),
    "exercises": (
        Case("03 --out {file}/e", rf"{FILE} folder with --out"),
        Case("03 --out {full}/e", rf"{FULL} folder with --out"),
        Case("--grade {folder}/none.ipynb", r"none.ipynb cannot be read: No such file"),
        Case("--grade {half}/half.ipynb", r"half.ipynb is not a notebook \(.*\): open and save it in Jupyter"),
        Case("--check 3.5", r"no lesson with exercises is called 3.5: "),
    ),
    "notebooks": (
        Case("01 --out {file}/b", rf"{FILE} folder with --out"),
        Case("01 --out {full}/b", rf"{FULL} folder with --out"),
        Case("01_one_proces --out {folder}/b", r"no notebook is called 01_one_proces: did you mean 01_one_process\?"),
        Case("{half}/half.ipynb --out {folder}/b", r"half.ipynb is not a notebook \(.*\): open and save it in Jupyter"),
        Case("03 -p n_ranks=0 --out {folder}/b", r"03_ddp: n_ranks is '0', but it must be greater than 0 \(ranks that"),
    ),
    "slides": (
        Case("radius --no-pdf --out {file}/b", rf"{FILE} folder with --out"),
        Case("radius --no-pdf --out {full}/b", rf"{FULL} folder with --out"),
        Case("radious --out {folder}/b", r"no deck is called radious: did you mean radius\?"),
        Case("{half}/half.md --out {folder}/b", r"half.md is not a deck: it begins with `title:`, `minutes:`"),
        Case("--pfd", r"unknown option --pfd: did you mean --pdf\?"),
    ),
}


def commands() -> set[str]:
    """The commands of the parser, each action of `data` and `kernel` by itself."""
    found = set()
    for name, parser in cli.commands("").items():
        deeper = cli.commands(name)[name]._subparsers
        actions = [group.choices for group in deeper._group_actions] if deeper else []
        found |= {f"{name} {action}" for choices in actions for action in choices} or {name}
        assert parser.epilog.startswith("example:")
    return found


def test_the_table_has_every_command_and_no_other():
    assert commands() == set(TABLE)
    assert {len(row) for row in TABLE.values()} == {len(CIRCUMSTANCES)}


# what the commands read ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The folders and files that the table names."""
    from aiscale.data.prepare import prepare_corpus
    from aiscale.recipes import recipe
    from aiscale.train import fit

    base = tmp_path_factory.mktemp("places")
    at = {name: base / name for name in ("file", "half", "text", "run", "damaged", "corpus", "cut", "torn", "full")}
    at["file"].write_text("a file where a folder is wanted")
    for name in ("half", "text", "torn", "full"):
        at[name].mkdir()
    (at["text"] / "a.txt").write_text("a few words " * 200)
    tiny = recipe("laptop").override(
        "model.n_layer=1", "loop.steps=2", "loop.eval_batches=1", "loop.device=cpu", "name=run"
    )
    fit(tiny, runs_dir=base, progress=False)
    shutil.copytree(at["run"], at["damaged"])
    _cut(next((at["damaged"] / "checkpoints/step_00000002").glob("*.distcp")))
    prepare_corpus(at["text"], at["corpus"], tokenizer="byte", progress=False)
    shutil.copytree(at["corpus"], at["cut"])
    _cut(at["cut"] / "00000.tokens")
    (at["half"] / "run.json").write_text((at["run"] / "run.json").read_text()[:500])
    (at["half"] / "site.toml").write_text('name = "half"\n[node')
    (at["half"] / "half.ipynb").write_text('{"cells": [')
    (at["half"] / "half.md").write_text("title: half a de")
    (at["half"] / "rows.csv").write_bytes("model,machine\nmodèle".encode()[:-3])  # cut within a letter
    (at["half"] / "a.txt").write_text("words")
    with tarfile.open(at["half"] / "class.tar.gz", "w:gz") as archive:
        archive.add(ROOT / "notebooks", "aiscale/notebooks")
    _cut(at["half"] / "class.tar.gz")
    at["launcher"] = ROOT / "launchers" / "frontier" / "ddp.sbatch"
    return at


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.fixture(scope="module")
def full(places):
    """A folder on a full disk; without root's rights, files of this process may not grow instead."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(places["full"])]
    if os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0:
        with open(places["full"] / "filler", "wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
        yield lambda: contextmanager(lambda: iter([None]))()
        subprocess.run(["umount", str(places["full"])], check=True)
    else:
        yield _no_growing


@contextmanager
def _no_growing():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


CASES = [
    pytest.param(command, case, id=f"{command}: {circumstance}", marks=[extended] if case.slow else [])
    for command, row in TABLE.items()
    for circumstance, case in zip(CIRCUMSTANCES, row, strict=False)
    if isinstance(case, Case)
]


@pytest.mark.parametrize(("command", "case"), CASES)
def test_bad_circumstances_are_one_line_and_nothing_is_left(command, case, places, full, tmp_path, monkeypatch, capsys):
    words, _, redirection = case.words.partition(" >")
    words = words.format(folder=tmp_path, **places).split()
    if "{torn}" in case.words:
        _tear(places)
    if redirection.startswith("in "):
        monkeypatch.chdir(redirection[3:].format(**places))
    elif redirection == "full":
        monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))
    own = TINY if command == "train" else []
    before = _files(places, tmp_path)
    capsys.readouterr()
    with full():
        status = cli.main([*command.split(), *words, *own])
    out, err = capsys.readouterr()
    told = [line for line in err.splitlines() if line.startswith("aiscale")] if case.status == 2 else [out]
    assert status == case.status, err
    assert len(told) == 1 and re.search(case.said, told[0]), err
    assert "Traceback" not in err and _files(places, tmp_path) == before


def _files(places: dict[str, Path], folder: Path) -> set[Path]:
    return {*folder.rglob("*"), *places["file"].parent.rglob("*")} - {places["run"] / ".lock"}


def _tear(places: dict[str, Path]) -> None:
    """Make the Hugging Face folder of which a part is missing."""
    from aiscale.train.export import export

    export(places["run"], places["torn"], overwrite=True)
    _cut(places["torn"] / "model.safetensors")


# signals -------------------------------------------------------------------------------------------------------------

#: command -> (words, a file that says that it works), or why it cannot be interrupted
LONG: dict[str, tuple[str, str] | str] = {
    "train": ("--runs-dir {folder} --set loop.steps=100000 --set loop.checkpoint_every=1", "laptop/metrics.jsonl"),
    "generate": ("{run} --tokens 1000000", ""),
    "verify": ("ddp-x2", ""),
    "bench": ("model --quick", ""),
    "doctor": ("--nproc 1", ""),
    "data prepare": ("{long} --tokenizer byte --shard-tokens 100000 --out {folder}/corpus", "corpus/progress.json"),
    "data show": "it is over in a moment",
    "evaluate": ("{run} --tasks aiscale_rolling", ""),
    "export": ("{run} {folder}/mine", ""),
    "kernel install": "it is over in a moment",
    "launchers": "it is over in a moment",
    "plan": "it is over in a moment",
    "submit": "it is over in a moment",
    "class reset": "it is over in a moment",
    "class price": "it is over in a moment",
    "models fetch": "what it has downloaded stays, and the next call goes on",
    "rehearse": "it ends with its command, whose status it returns (tests/test_rehearsal.py)",
    "exercises": ("--check 03", ""),
    "notebooks": ("01 --out {folder}/b", "b/notebooks/01_one_process.log"),
    "slides": ("01 --out {folder}/b", "b/notebooks/01_one_process.log"),
}
#: What may stay: a run that can be resumed, a corpus that can be gone on with, and the results of notebooks.
STAYS = re.compile(r"laptop(/[^.].*|/\.lock)?|laptop/checkpoints/step_\d+/\.metadata|corpus(/[^.].*)?|b(/notebooks.*)?")
PRESSES = {"SIGTERM": [signal.SIGTERM], "Ctrl-C": [signal.SIGINT], "Ctrl-C twice": [signal.SIGINT] * 2}
#: `train` saves and says so with 130, as launchers expect; `notebooks` ends in the same way for both signals.
STATUS = {("train", "SIGTERM"): 130, ("notebooks", "SIGTERM"): 130, ("slides", "SIGTERM"): 130}


def test_every_command_is_interrupted_or_cannot_be():
    assert commands() == set(LONG)


@extended
@pytest.mark.parametrize("press", PRESSES)
@pytest.mark.parametrize("command", [name for name, how in LONG.items() if not isinstance(how, str)])
def test_a_command_that_is_interrupted_ends_in_order(command, press, places, tmp_path):
    words, sign = LONG[command]
    long = places["text"].with_name("long.txt")
    long.write_text("many words " * 3_000_000)
    words = words.format(folder=tmp_path, long=long, **places).split()
    job = subprocess.Popen(
        [sys.executable, "-m", "aiscale", *command.split(), *words, *(TINY if command == "train" else [])],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "AISCALE_TEST": str(tmp_path)},
    )
    wait_until(lambda: _catches(job.pid) and (not sign or (tmp_path / sign).exists()), 90, "it works")
    for number in PRESSES[press]:
        os.kill(job.pid, number)
        time.sleep(0.1)  # two presses, not one
    _, err = job.communicate(timeout=60)
    expected = STATUS.get((command, press), 143 if press == "SIGTERM" else 130)
    assert job.returncode == expected and "Traceback" not in err, (job.returncode, err)
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")]
    assert [path for path in left if not STAYS.fullmatch(path)] == []
    wait_until(lambda: not processes_with(str(tmp_path)), 20, "no process is left")


def _catches(pid: int) -> bool:
    """Whether a process has its own handler for SIGTERM: `main` has begun."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    return bool(int(re.search(r"SigCgt:\s*(\w+)", text)[1], 16) & 1 << signal.SIGTERM - 1)


# ranks under mpiexec --------------------------------------------------------------------------------------------------


@extended
def test_a_port_that_is_taken_ends_a_job_of_mpiexec_in_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["train", *TINY, "--set", "parallel.strategy=ddp", "--runs-dir", str(tmp_path)]
        done = subprocess.run(
            [Path(sys.executable).parent / "mpiexec", "-n", "2", sys.executable, "-m", "aiscale", *words],
            env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            capture_output=True,
            text=True,
            timeout=200,  # the other rank's wait for rank 0 was 300 s
        )
    said = (
        f"aiscale: 127.0.0.1:{port} is already in use by another process: set MASTER_PORT to a free port, or unset it"
    )
    assert done.returncode == 2 and done.stderr.splitlines() == [said], done.stderr


@extended
def test_ranks_of_mpiexec_on_one_machine_open_no_port_to_the_network(tmp_path):
    """hydra's own port, which every child inherits, is open to all: mpiexec has no option against it."""
    code = """
    import listening
    from mpi4py import MPI
    MPI.COMM_WORLD.barrier()
    say([line for line in listening.beyond_loopback([os.getpid()]) if not line.endswith(" 0.0.0.0")])
    """
    env = {"PYTHONPATH": str(Path(__file__).parent)}
    done = run_ranks(code, 2, tmp_path, launcher="mpiexec", env=env)
    assert done.stdout.split() == ["[]", "[]"], (done.stdout, done.stderr)


# the rest -------------------------------------------------------------------------------------------------------------


def test_a_word_that_is_nearly_a_command_is_named(capsys):
    assert cli.main(["trian"]) == 2
    assert capsys.readouterr().err == "aiscale: unknown command 'trian': did you mean train?\n"


def test_a_fault_in_a_module_that_a_command_needs_is_one_line(monkeypatch, capsys):
    """As a machine file that cannot be read, whose module is imported while the parser is built."""
    from aiscale.config import ConfigError

    def broken(name):
        raise ConfigError("machines/accelerators/a100.toml is not TOML: line 3")

    monkeypatch.setattr(cli.importlib, "import_module", broken)
    assert cli.main(["bench", "gpu"]) == 2
    assert capsys.readouterr().err == "aiscale: machines/accelerators/a100.toml is not TOML: line 3\n"


def test_a_reader_that_closes_the_pipe_is_no_error(tmp_path):
    shell = f"{sys.executable} -m aiscale launchers --out {tmp_path} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 141) and done.stderr == ""


def test_a_refusal_does_not_import_torch(tmp_path):
    code = "import sys; from aiscale.cli import main; status = main(['train', '--recipe', 'laptp']); "
    done = subprocess.run(
        [sys.executable, "-c", f"{code} raise SystemExit(status + 10 * ('torch' in sys.modules))"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "did you mean laptop?" in done.stderr
