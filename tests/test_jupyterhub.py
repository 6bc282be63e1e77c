"""JupyterHub by workshop/jupyterhub_config.py: for accounts, for a class, as jobs; it starts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from traitlets.config import Config

from aiscale.lesson.rehearsal_hub import Hub
from aiscale.lesson.rehearsal_kernels import Kernel
from aiscale.processes import marked
from ranks import wait_until

ROOT = Path(__file__).parents[1]
CONFIGURATION = ROOT / "workshop/jupyterhub_config.py"


def configured(folder: Path, uid: int, file: Path = CONFIGURATION, **settings: str) -> Config:
    made, mask = Config(), os.umask(0o022)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.geteuid", lambda: uid)
        for name, value in {"AISCALE_HUB": str(folder / "hub"), **settings}.items():
            patch.setenv(name, value)
        try:
            runpy.run_path(str(file), init_globals={"get_config": lambda: made})
        finally:
            os.umask(mask)
    return made


def test_a_hub_of_root_uses_accounts_and_any_other_a_class_password(tmp_path, capsys):
    for_accounts = configured(tmp_path, 0, AISCALE_HUB_ADMINS="ada")
    assert (
        for_accounts.JupyterHub.authenticator_class == "pam"
        and for_accounts.Authenticator.admin_users == {"ada"}
    )
    assert for_accounts.JupyterHub.spawner_class == "jupyterhub.spawner.LocalProcessSpawner"
    assert "nobody is held to memory or cores: pip install" in capsys.readouterr().err
    for_a_class = configured(tmp_path, 1000)
    password = (tmp_path / "hub/password").read_text().strip()
    assert for_a_class.SharedPasswordAuthenticator.user_password == password and len(password) >= 12
    assert configured(tmp_path, 1000).SharedPasswordAuthenticator.user_password == password, (
        "it stays"
    )
    assert password not in capsys.readouterr().err


def test_the_hub_serves_the_network_only_with_a_certificate(tmp_path):
    assert configured(tmp_path, 0).JupyterHub.bind_url == "http://127.0.0.1:8000"
    both = {
        "AISCALE_HUB_CERTIFICATE": "/c.pem",
        "AISCALE_HUB_KEY": "/k.pem",
        "AISCALE_HUB_PORT": "443",
    }
    assert configured(tmp_path, 0, **both).JupyterHub.bind_url == "https://:443"
    with pytest.raises(SystemExit, match="belong together"):
        configured(tmp_path, 0, AISCALE_HUB_KEY="/k.pem")


def test_with_an_account_of_slurm_each_server_is_a_job(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "batchspawner", SimpleNamespace())
    checkout = tmp_path / "a checkout"  # paths go into a shell's script
    checkout.symlink_to(ROOT)
    (tmp_path / "an environment/bin").mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "an environment/bin/python"))
    asked = {
        "AISCALE_HUB_SLURM": "abc123",
        "AISCALE_HUB_SBATCH": "-p small",
        "AISCALE_HUB_TIME": "30:00",
    }
    hub = configured(tmp_path, 0, checkout / "workshop/jupyterhub_config.py", **asked)
    assert hub.JupyterHub.spawner_class == "batchspawner.SlurmSpawner"
    assert hub.SlurmSpawner.req_options == "--account=abc123 -p small"
    assert (hub.SlurmSpawner.req_runtime, hub.SlurmSpawner.req_memory) == ("30:00", "3G")
    assert shlex.split(hub.SlurmSpawner.batchspawner_singleuser_cmd)[0].endswith(
        "/batchspawner-singleuser"
    )
    script = f'{hub.SlurmSpawner.req_prologue}\necho "$PATH"'
    done = subprocess.run(
        ["bash", "-euc", script], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith(f"{tmp_path}/an environment/bin:")
    assert (tmp_path / "notebooks/04_zero.ipynb").exists()
    assert (tmp_path / "workshop/exercises/03_ddp.ipynb").exists()


def test_the_hub_serves_the_room_and_tells_seats_of_it_only_if_asked(tmp_path):
    assert "AISCALE_ROOM" not in configured(tmp_path, 1000).Spawner.environment
    hub = configured(tmp_path, 1000, AISCALE_HUB_ROOM="https://hub.example.org/")
    room = hub.JupyterHub.services[-1]
    assert room["url"] == "http://127.0.0.1:8765", "only the hub's proxy reaches it"
    url, _, token = hub.Spawner.environment["AISCALE_ROOM"].partition("/#")
    assert url == "https://hub.example.org/services/room" and url in room["command"]
    kept = json.loads((tmp_path / "hub/room.json").read_text())
    assert kept["seats_token"] == token and kept["helpers_token"] not in str(hub)


def class_with_a_site(folder: Path) -> Path:
    """The configuration of a checkout in which a site is built."""
    tree = folder / "a class"
    (tree / "build/site").mkdir(parents=True)
    for name in ("workshop", "notebooks", "src"):
        (tree / name).symlink_to(ROOT / name)
    (tree / "build/site/index.html").write_text("the lessons")
    (tree / "build/site/quiz.html").write_text("ten questions")
    return tree / "workshop/jupyterhub_config.py"


async def run_on(url: str) -> list[str]:
    """What two cells come to on a seat that a rehearsal starts."""
    hub = Hub(url, "a class of thirty")
    token = hub.log_in("rehearsal-1")
    there = hub.start("rehearsal-1", token)
    async with Kernel(there, token, "notebooks/00_start_here.ipynb") as kernel:
        found = [await kernel.run(source) for source in ("import aiscale", "1 / 0")]
    assert marked("JUPYTERHUB_USER", "rehearsal-1")
    hub.stop("rehearsal-1", token)
    return found


@pytest.mark.extended
def test_the_hub_starts_with_its_configuration_asks_for_a_name_and_serves_the_room(tmp_path):
    jupyterhub = Path(sys.executable).with_name("jupyterhub")
    if not jupyterhub.exists() or not shutil.which("configurable-http-proxy"):
        pytest.skip("no jupyterhub or configurable-http-proxy here: pip install '.[hub]'")
    ports = random.sample(range(20000, 32768), 5)
    config = tmp_path / "config.py"
    class_ = class_with_a_site(tmp_path)
    config.write_text(
        f"load_subconfig({str(class_)!r})\nc.JupyterHub.hub_port = {ports[1]}\n"
        f"c.ConfigurableHTTPProxy.api_url = 'http://127.0.0.1:{ports[2]}'\n"
        f"c.JupyterHub.services[0]['url'] = 'http://127.0.0.1:{ports[4]}'\n"
        "room = c.JupyterHub.services[-1]\n"
        f"room['url'] = 'http://127.0.0.1:{ports[3]}'\n"
        f"room['command'][room['command'].index('8765')] = '{ports[3]}'\n"
        # as a hub that nobody's root starts
        "c.JupyterHub.authenticator_class = 'shared-password'\n"
        "c.SharedPasswordAuthenticator.user_password = 'a class of thirty'\n"
        "c.JupyterHub.spawner_class = 'simple'\n"
        f"c.SimpleLocalProcessSpawner.home_dir_template = '{tmp_path}/homes/{{username}}'\n"
        "c.Spawner.args.append('--allow-root')\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
    env |= {"AISCALE_HUB": str(tmp_path / "hub"), "AISCALE_HUB_PORT": str(ports[0])}
    env["AISCALE_HUB_ROOM"] = f"http://127.0.0.1:{ports[0]}"
    env.setdefault("NODE_PATH", "/usr/share/nodejs")
    hub = subprocess.Popen(
        [jupyterhub, "-f", config],
        env=env,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{ports[0]}/hub"

    def answers(url: str) -> bool:
        assert hub.poll() is None, hub.stderr.read()
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=5).close()
            return True
        return False

    try:
        wait_until(lambda: answers(f"{address}/health"), 90, "the hub answers")
        assert (
            'name="username"'
            in urllib.request.urlopen(f"{address}/login", timeout=30).read().decode()
        )
        site = f"http://127.0.0.1:{ports[0]}/services/class"
        wait_until(lambda: answers(f"{site}/quiz.html"), 60, "the hub serves the quiz")
        assert b"the lessons" in urllib.request.urlopen(f"{site}/", timeout=30).read()
        page = urllib.request.urlopen(f"{address}/login", timeout=30).read().decode()
        assert '<a href="/services/class/quiz.html">quiz</a>' in page and "planner" not in page
        room = f"http://127.0.0.1:{ports[0]}/services/room"
        wait_until(lambda: answers(f"{room}/wall"), 60, "the hub serves the room")
        tokens = json.loads((tmp_path / "hub/room.json").read_text())
        guess = {"AISCALE_ROOM": f"{room}/#{tokens['seats_token']}", "AISCALE_PROGRESS": tmp_path}
        code = "from aiscale.lesson import predict; predict('n', 3)"
        subprocess.run([sys.executable, "-c", code], env=env | guess, check=True)

        def arrived() -> bool:
            key = {"Authorization": f"Bearer {tokens['helpers_token']}"}
            asked = urllib.request.Request(f"{room}/api/wall", headers=key)
            return json.load(urllib.request.urlopen(asked, timeout=30)).get("guessed") == 1

        wait_until(arrived, 30, "the guess is on the wall")
        assert asyncio.run(run_on(address.removesuffix("/hub"))) == [
            "",
            "ZeroDivisionError: division by zero",
        ]
        wait_until(lambda: not marked("JUPYTERHUB_USER", "rehearsal-1"), 60, "the server has gone")
    finally:
        os.killpg(hub.pid, signal.SIGINT)
        hub.communicate(timeout=60)
