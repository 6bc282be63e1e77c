"""JupyterHub by workshop/jupyterhub_config.py: for accounts, for a class, as jobs; it starts."""

from __future__ import annotations

import contextlib
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


@pytest.mark.extended
def test_the_hub_starts_with_its_configuration_and_asks_for_a_name(tmp_path):
    jupyterhub = Path(sys.executable).with_name("jupyterhub")
    if not jupyterhub.exists() or not shutil.which("configurable-http-proxy"):
        pytest.skip("no jupyterhub or configurable-http-proxy here: pip install '.[hub]'")
    ports = random.sample(range(20000, 32768), 3)
    config = tmp_path / "config.py"
    config.write_text(
        f"load_subconfig({str(CONFIGURATION)!r})\nc.JupyterHub.hub_port = {ports[1]}\n"
        f"c.ConfigurableHTTPProxy.api_url = 'http://127.0.0.1:{ports[2]}'\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
    env |= {"AISCALE_HUB": str(tmp_path / "hub"), "AISCALE_HUB_PORT": str(ports[0])}
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

    def answers() -> bool:
        assert hub.poll() is None, hub.stderr.read()
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return True
        return False

    try:
        wait_until(answers, 90, "the hub answers")
        assert (
            'name="username"'
            in urllib.request.urlopen(f"{address}/login", timeout=30).read().decode()
        )
    finally:
        os.killpg(hub.pid, signal.SIGINT)
        hub.communicate(timeout=60)
