"""JupyterHub as workshop/jupyterhub_config.py sets it up: people log in with a browser and run ranks in a notebook."""

from __future__ import annotations

import contextlib
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from nbformat import v4
from traitlets.config import Config

import listening
from aiscale.hpc.kernel import install, start_script
from browser import Browser, Page, find_browser

ROOT = Path(__file__).parents[1]
CONFIGURATION = ROOT / "workshop/jupyterhub_config.py"
PICTURE = ROOT / "build/jupyterhub.png"
BIN = Path(sys.executable).parent

#: Root would need accounts for people. In a user namespace the test runs as another user that owns root's files.
AS_A_USER = ["unshare", "--user", "--map-user=1000", "--map-group=1000"] if os.geteuid() == 0 else []

#: In addition: free ports, and a JavaScript handle to JupyterLab for the test.
CONFIG = """
load_subconfig({config!r})
c.JupyterHub.hub_port = {hub}
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{api}"
c.Spawner.args += ["--LabApp.expose_app_in_browser=True"]
c.Spawner.default_url = "/lab/tree/ranks.ipynb"
servers = iter({servers})
c.Spawner.pre_spawn_hook = lambda spawner: setattr(spawner, "port", next(servers))
"""
CELLS = (
    "from aiscale import cluster\n\nranks = cluster.start(2)",
    "%%px\nx = torch.full((3,), rank + 1.0)\ndist.all_reduce(x)\nprint(f'the sum on rank {rank}:', x.tolist())",
    "ranks",
)
SUMS = [f"the sum on rank {rank}: [3.0, 3.0, 3.0]" for rank in (0, 1)]


def why_not() -> str:
    """What this machine lacks for a hub; empty if nothing."""
    if not find_browser():
        return "no chromium on this machine"
    if not (BIN / "jupyterhub").exists():
        return "no jupyterhub here: pip install '.[hub]'"
    if AS_A_USER and subprocess.run([*AS_A_USER, "true"], capture_output=True, timeout=60).returncode:
        return "user namespaces are not allowed here, and a hub of root's needs accounts: run this as another user"
    if not shutil.which("configurable-http-proxy"):
        return "no configurable-http-proxy here: apt-get install node-configurable-http-proxy"
    return ""


def free_ports(count: int) -> list[int]:
    """Ports that stay free for seconds: the system assigns ports from 32768 on."""
    with contextlib.ExitStack() as held:
        found = []
        for port in random.sample(range(20000, 32768), 1000):
            taken = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                taken.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise RuntimeError(f"no {count} free ports below 32768")


class Hub:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "hub"
        self.port, hub, api, *servers = free_ports(5)
        config = folder / "config.py"
        config.write_text(CONFIG.format(config=str(CONFIGURATION), hub=hub, api=api, servers=servers))
        self.log = folder / "hub.log"
        env = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
        env |= {"AISCALE_HUB": str(self.folder), "AISCALE_HUB_PORT": str(self.port), "USER": "class"}
        # Node.js from elsewhere does not search the folder of Debian's packages.
        env.setdefault("NODE_PATH", "/usr/share/nodejs")
        command = [*AS_A_USER, BIN / "jupyterhub", "-f", config]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, env=env, cwd=folder, stdout=log, stderr=log, start_new_session=True
            )
        self.await_start()
        self.password = (self.folder / "password").read_text().strip()

    def await_start(self, timeout_s: float = 90) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(self.address("hub/health"), timeout=5).close()
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the hub did not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.2)

    def address(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}"

    def home(self, name: str) -> Path:
        return self.folder / "homes" / name

    def pids(self) -> list[int]:
        """The hub, its proxy, all servers and kernels, and their ranks."""
        return listening.descendants(self.process.pid)

    def stop(self) -> None:
        """As Ctrl-C does: the hub ends its proxy and all servers."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def enter(hub: Hub, page: Page, name: str) -> None:
    """Log in by the form, with a notebook, a started lesson and a kernel in the home folder."""
    home = hub.home(name)
    (home / "notebooks").mkdir(parents=True)
    (home / "notebooks/03_ddp.ipynb").write_text("changed")
    script = start_script("aiscale", Path(sys.prefix), None, "", {})
    install("aiscale", "aiscale", script, str(home / ".local"))
    cells = [v4.new_markdown_cell(f"## {name}'s ranks"), *map(v4.new_code_cell, CELLS)]
    kernel = {"kernelspec": {"name": "aiscale", "display_name": "aiscale", "language": "python"}}
    nbformat.write(v4.new_notebook(cells=cells, metadata=kernel), home / "ranks.ipynb")
    page.goto(hub.address("hub/login"))
    page.wait("document.querySelector('input[name=password]')")
    page.evaluate(f"document.querySelector('input[name=username]').value = '{name}'")
    page.evaluate(f"document.querySelector('input[name=password]').value = '{hub.password}'")
    page.evaluate("document.querySelector('input[type=submit]').click()")


KERNEL = "jupyterapp.shell.currentWidget.sessionContext.session.kernel"
DONE = (
    """(() => {
  const cells = jupyterapp.shell.currentWidget.content.model.sharedModel.cells.filter(c => c.cell_type == 'code');
  return cells.every(c => c.execution_count) && """
    + KERNEL
    + """.status == 'idle';
})()"""
)


def configured(folder: Path, uid: int, **settings: str) -> Config:
    made, mask = Config(), os.umask(0o022)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.geteuid", lambda: uid)
        for name, value in {"AISCALE_HUB": str(folder / "hub"), **settings}.items():
            patch.setenv(name, value)
        try:
            runpy.run_path(str(CONFIGURATION), init_globals={"get_config": lambda: made})
        finally:
            os.umask(mask)
    return made


def test_a_hub_of_root_uses_accounts_and_any_other_a_class_password(tmp_path, capsys):
    for_accounts = configured(tmp_path, 0, AISCALE_HUB_ADMINS="ada")
    assert for_accounts.JupyterHub.authenticator_class == "pam" and for_accounts.Authenticator.admin_users == {"ada"}
    assert for_accounts.JupyterHub.spawner_class == "jupyterhub.spawner.LocalProcessSpawner"
    assert "nobody is held to memory or cores: pip install" in capsys.readouterr().err
    for_a_class = configured(tmp_path, 1000)
    password = (tmp_path / "hub/password").read_text().strip()
    assert for_a_class.SharedPasswordAuthenticator.user_password == password and len(password) >= 12
    assert configured(tmp_path, 1000).SharedPasswordAuthenticator.user_password == password, "it stays"
    assert password not in capsys.readouterr().err


def test_the_hub_serves_the_network_only_with_a_certificate(tmp_path):
    assert configured(tmp_path, 0).JupyterHub.bind_url == "http://127.0.0.1:8000"
    both = {"AISCALE_HUB_CERTIFICATE": "/c.pem", "AISCALE_HUB_KEY": "/k.pem", "AISCALE_HUB_PORT": "443"}
    assert configured(tmp_path, 0, **both).JupyterHub.bind_url == "https://:443"
    with pytest.raises(SystemExit, match="belong together"):
        configured(tmp_path, 0, AISCALE_HUB_KEY="/k.pem")


def test_with_an_account_of_slurm_each_server_is_a_job(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "batchspawner", SimpleNamespace())
    hub = configured(tmp_path, 0, AISCALE_HUB_SLURM="abc123", AISCALE_HUB_SBATCH="-p small", AISCALE_HUB_TIME="30:00")
    assert hub.JupyterHub.spawner_class == "batchspawner.SlurmSpawner"
    assert hub.SlurmSpawner.req_options == "--account=abc123 -p small"
    assert (hub.SlurmSpawner.req_runtime, hub.SlurmSpawner.req_memory) == ("30:00", "2G")
    subprocess.run(["bash", "-euc", hub.SlurmSpawner.req_prologue], cwd=tmp_path, check=True)
    assert (tmp_path / "notebooks/04_zero.ipynb").exists() and (tmp_path / "workshop/exercises/03_ddp.ipynb").exists()


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Two people's pages after both have run their notebook at the same time, and the hub."""
    if why_not():
        pytest.skip(why_not())
    folder = tmp_path_factory.mktemp("hub")
    hub = Hub(folder)
    try:
        with Browser(folder) as browser:
            pages = {name: browser.page() for name in ("ada", "grace")}
            for name, page in pages.items():
                enter(hub, page, name)
            for page in pages.values():
                # The page shows a starting kernel as idle, so the kernel itself is asked.
                page.wait(f"{KERNEL}.status == 'idle'")
                page.evaluate("void jupyterapp.commands.execute('notebook:run-all-cells')")
            for page in pages.values():
                page.wait(DONE)
                page.wait(f"document.body.innerText.includes('{SUMS[-1]}')")  # it is drawn a little later
            pages["ada"].screenshot(PICTURE)
            yield hub, pages
    finally:
        hub.stop()


@pytest.mark.extended
def test_cells_run_on_the_ranks_of_each_person_in_the_browser(seen):
    _, pages = seen
    for page in pages.values():
        text = page.text()
        assert "2 ranks on" in text, text
        assert [each for each in SUMS if each not in text] == [], text


@pytest.mark.extended
def test_everyone_has_the_lessons_and_keeps_their_changes(seen):
    hub, _ = seen
    lessons = {path.name: path.read_bytes() for path in (ROOT / "notebooks").glob("*.ipynb")}
    theirs = {path.name: path.read_bytes() for path in (hub.home("grace") / "notebooks").glob("*.ipynb")}
    assert theirs.keys() == lessons.keys()
    assert [name for name in lessons if theirs[name] != lessons[name]] == ["03_ddp.ipynb"]


@pytest.mark.extended
def test_nobody_can_open_another_persons_server(seen):
    hub, pages = seen  # the last test: it leaves the page
    assert pages["grace"].evaluate("location.pathname").startswith("/user/grace/lab")
    pages["grace"].goto(hub.address("user/ada/lab"))
    pages["grace"].wait("location.pathname.startsWith('/hub/') && document.readyState == 'complete'")
    assert pages["grace"].evaluate("performance.getEntriesByType('navigation')[0].responseStatus") == 403
    assert "403" in pages["grace"].text()
