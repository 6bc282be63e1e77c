"""`aiscale kernel`: a Jupyter kernel that loads a site's modules and environment, then Python."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from traitlets.config import Config

from aiscale import cli
from aiscale.site import profiles
from aiscale.site.kernel import install, start_script
from aiscale.site.profiles import names, site
from ranks import wait_until

#: A `module` that records its arguments; bash takes the function from the environment.
MODULE = {"BASH_FUNC_module%%": '() { echo "$*" >> "$MODULE_CALLS"; }'}
#: Kernels listen on files in their starting folder: another process may take a port before the
#: kernel does.
SOCKETS = Config({"KernelManager": {"transport": "ipc", "ip": "kernel"}})


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A Jupyter without kernels other than those installed in the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("MODULE_CALLS", str(tmp_path / "modules.txt"))
    for name in ("AISCALE_SITE", "JUPYTER_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in MODULE.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def test_a_notebook_runs_in_the_installed_kernel_with_modules_environment_and_site(home, capsys):
    from nbclient import NotebookClient
    from nbformat import v4

    assert cli.main(["kernel", "install", "--site", "frontier"]) == 0
    said = capsys.readouterr()
    assert said.out.strip() == str(home / "data/kernels/aiscale-frontier")
    assert "'aiscale, Frontier (OLCF)'" in said.err
    code = "import sys, os, shutil; print(sys.prefix, os.environ['AISCALE_SITE'], "
    code += "shutil.which('python'), "
    code += "oct(os.stat(os.path.dirname(os.environ['TORCH_EXTENSIONS_DIR'])).st_mode))"
    notebook = v4.new_notebook(cells=[v4.new_code_cell(code)])
    NotebookClient(
        notebook, kernel_name="aiscale-frontier", timeout=60, iopub_timeout=60, config=SOCKETS
    ).execute()
    assert notebook.cells[0].outputs[0].text.split() == [
        sys.prefix,
        "frontier",
        f"{sys.prefix}/bin/python",
        "0o40700",
    ]
    loaded = (home / "modules.txt").read_text()
    assert (
        loaded.index("load PrgEnv-gnu") < loaded.index(" rocm/") < loaded.index(" rccl-net-plugin")
    )


def test_a_kernel_brings_variables_into_notebooks(home):
    words = [
        "kernel",
        "install",
        "--site",
        "none",
        "--env",
        "SBATCH_ACCOUNT=abc123",
        "--env",
        "A_FEW=it's 1=1",
    ]
    assert cli.main(words) == 0
    start = home / "data/kernels/aiscale/start.sh"
    shown = subprocess.run(
        [start, "-c", "import os; print(os.environ['SBATCH_ACCOUNT'], os.environ['A_FEW'])"],
        capture_output=True,
    )
    assert shown.stdout == b"abc123 it's 1=1\n"


def test_nobody_else_can_read_the_variables_of_a_kernel(home, capsys):
    assert cli.main(["kernel", "install", "--site", "none", "--env", "TOKEN=secret"]) == 0
    folder = home / "data/kernels/aiscale"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes == {"aiscale": 0o700, "start.sh": 0o700, "kernel.json": 0o600}
    capsys.readouterr()
    shared = str(home / "class")
    assert (
        cli.main(
            ["kernel", "install", "--site", "none", "--env", "TOKEN=secret", "--prefix", shared]
        )
        == 0
    )
    assert f"All who can read {shared} can read TOKEN." in capsys.readouterr().err


def test_a_kernel_of_a_site_of_ones_own_names_its_profile_to_cluster_start(home):
    text = Path(profiles.__file__).with_name("generic.toml").read_text()
    (home / "it's mine.toml").write_text(text.replace('name = "generic"', 'name = "mine"'))
    assert cli.main(["kernel", "install", "--site", "it's mine.toml"]) == 0
    start = home / "data/kernels/aiscale-mine/start.sh"
    code = "from aiscale.site.profiles import here; import os; "
    code += "print(here().name, os.environ['AISCALE_SITE'])"
    elsewhere = home / "data"  # a notebook may lie in another folder than the profile
    shown = subprocess.run([start, "-c", code], capture_output=True, text=True, cwd=elsewhere)
    assert shown.stdout == f"mine {home}/it's mine.toml\n", shown.stderr


def test_an_interrupt_reaches_python_through_the_start_script(home):
    from jupyter_client import KernelManager

    install("mine", "Mine", start_script("mine", Path(sys.prefix), None, "", {}))
    manager = KernelManager(kernel_name="mine", config=SOCKETS)
    manager.start_kernel()
    client = manager.blocking_client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=60)
        # The cell signals by a file: ipykernel may lose an interrupt while it sends printed text.
        asked = client.execute("import time; open('on', 'w').close(); time.sleep(600)")
        wait_until((home / "on").exists, 60, "the cell has begun")
        manager.interrupt_kernel()
        while (reply := client.get_shell_msg(timeout=120))["parent_header"]["msg_id"] != asked:
            pass
        assert reply["content"]["ename"] == "KeyboardInterrupt"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("name", [*names(), None])
def test_start_scripts_are_sound_bash(tmp_path, name):
    (tmp_path / "it's an environment/bin").mkdir(parents=True)
    (tmp_path / "it's an environment/bin/python").touch()
    text = start_script(
        "mine", tmp_path / "it's an environment", site(name) if name else None, "", {}
    )
    (tmp_path / "start.sh").write_text(text)
    assert subprocess.run(["bash", "-n", tmp_path / "start.sh"]).returncode == 0
    assert "/tmp/$" not in text, "whoever makes a folder there first can put code into it"
    if not shutil.which("shellcheck"):
        pytest.skip("no shellcheck on this machine")
    done = subprocess.run(["shellcheck", tmp_path / "start.sh"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_kernel_for_a_class_is_readable_by_all_and_writable_by_its_owner_only(home):
    mask = os.umask(0o077)
    try:
        words = [
            "kernel",
            "install",
            "--site",
            "none",
            "--prefix",
            str(home / "class"),
            "--name",
            "mine",
        ]
        assert cli.main(words) == cli.main(words) == 0, "the second replaces the first"
    finally:
        os.umask(mask)
    folder = home / "class/share/jupyter/kernels/mine"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes == {"mine": 0o755, "start.sh": 0o755, "kernel.json": 0o644}


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--name", "a/b"], "Invalid kernel name 'a/b'"),
        (
            ["--environment", "/nowhere"],
            "environment /nowhere has no bin/python: name a venv or conda environment",
        ),
        (["--site", "frontir"], "unknown site 'frontir': did you mean frontier?"),
        (["--prefix", "/proc/none"], "name another folder with --prefix"),
    ],
)
def test_bad_input_is_one_line_with_the_remedy(home, capsys, argv, told):
    assert cli.main(["kernel", "install", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("aiscale: ") and told in error and error.count("\n") == 1
