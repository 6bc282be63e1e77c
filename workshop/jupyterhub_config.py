"""A JupyterHub for a class, on one Linux machine: each participant needs a browser only, and starts real ranks in it.

    make setup                                    # the hub is among what it installs (elsewhere: pip install '.[hub]')
    apt-get install node-configurable-http-proxy  # its proxy; or: npm install -g configurable-http-proxy
    .venv/bin/jupyterhub -f workshop/jupyterhub_config.py    # then http://127.0.0.1:8000

Started by root, people log in with their accounts of this machine, and each works as themselves; they must be able to
read this project and its .venv, which therefore lie in no home, but in /opt/aiscale, say. Started by anybody else, they
choose a name, and all have the one password that the hub writes to FOLDER/password: everything then runs as the one who
started the hub, so that is for people who trust each other, and best for an account made for the class.

A centre's login node is not its place: everybody there reaches the loopback. Centres have hubs of their own (see
workshop/README.md). Not encrypted: without a certificate, what browsers and hub exchange; always, what hub and proxy
exchange with people's servers (with AISCALE_HUB_SLURM between nodes), and notebooks with their kernels and ranks.

Settings are variables of the environment, so that this file can stay as it is:

    AISCALE_HUB=FOLDER              what the hub keeps: database, secrets, homes (default: aiscale-hub in your home)
    AISCALE_HUB_ADMINS=NAME,NAME    accounts that may stop other people's servers
    AISCALE_HUB_CERTIFICATE=FILE AISCALE_HUB_KEY=FILE   serve https to the network. Without them only this machine is
                                    served, which people reach by ssh -L 8000:127.0.0.1:8000
    AISCALE_HUB_PORT=8000
    AISCALE_HUB_ROOM=URL            the hub's own address, as seats reach it (https://hub.example.org): seats tell their
                                    guesses to the class's room (workshop/room), whose pages the hub serves
    AISCALE_HUB_MEMORY=3G AISCALE_HUB_CORES=2   the most that a person gets. Root's hub on a machine with systemd holds
                                    people to it, by jupyterhub-systemdspawner (pip install it); otherwise nothing does
    AISCALE_HUB_SLURM=ACCOUNT       each server in a batch job of its person, charged to ACCOUNT, by batchspawner (pip
                                    install it). For root's hub on a node that compute nodes reach, where people have
                                    accounts; AISCALE_HUB_SBATCH="-p small", AISCALE_HUB_TIME=2:00:00: for sbatch

A person needs 2 GiB of free memory (3 GiB for lesson 07): workshop/README.md has a table.
With a Node.js that is not Debian's, Debian's proxy needs NODE_PATH=/usr/share/nodejs.
"""

import os
import secrets
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

c = get_config()  # noqa: F821  # jupyterhub defines it

os.umask(0o077)  # what the hub writes is nobody else's to read
FOLDER = Path(os.environ.get("AISCALE_HUB", Path.home() / "aiscale-hub")).absolute()
FOLDER.mkdir(parents=True, exist_ok=True)
FOLDER.chmod(0o700)
BIN = Path(sys.executable).parent
NOTEBOOKS = Path(__file__).absolute().parents[1] / "notebooks"

# Where it listens ----------------------------------------------------------------------------------------------------

certificate, key = (os.environ.get(f"AISCALE_HUB_{name}", "") for name in ("CERTIFICATE", "KEY"))
if bool(certificate) != bool(key):
    raise SystemExit("AISCALE_HUB_CERTIFICATE and AISCALE_HUB_KEY belong together: give both, or neither")
c.JupyterHub.ssl_cert, c.JupyterHub.ssl_key = certificate, key
scheme, address = ("https", "") if certificate else ("http", "127.0.0.1")
c.JupyterHub.bind_url = f"{scheme}://{address}:{os.environ.get('AISCALE_HUB_PORT', '8000')}"

# What it keeps -------------------------------------------------------------------------------------------------------

c.JupyterHub.db_url = f"sqlite:///{FOLDER / 'hub.sqlite'}"
c.JupyterHub.cookie_secret_file = str(FOLDER / "cookie_secret")
c.ConfigurableHTTPProxy.pid_file = str(FOLDER / "proxy.pid")

# Who may come in -----------------------------------------------------------------------------------------------------

c.Authenticator.allow_all = True
if os.geteuid() == 0:
    for path in dict.fromkeys((Path(sys.executable), Path(sys.executable).resolve(), NOTEBOOKS)):
        for folder in path.parents:
            if not folder.stat().st_mode & 0o001:
                print(f"people's servers will not start: they may not enter {folder}, where {path} is", file=sys.stderr)
    c.JupyterHub.authenticator_class = "pam"
    limited = find_spec("systemdspawner") and Path("/run/systemd/system").is_dir()
    local = "jupyterhub.spawner.LocalProcessSpawner"
    c.JupyterHub.spawner_class = "systemdspawner.SystemdSpawner" if limited else local
    if not limited:
        print("nobody is held to memory or cores: pip install jupyterhub-systemdspawner", file=sys.stderr)
    c.Authenticator.admin_users = {name for name in os.environ.get("AISCALE_HUB_ADMINS", "").split(",") if name}
else:
    password = FOLDER / "password"
    if not password.exists():
        password.write_text(secrets.token_urlsafe(12) + "\n")
    c.JupyterHub.authenticator_class = "shared-password"
    c.SharedPasswordAuthenticator.user_password = password.read_text().strip()
    c.Authenticator.username_pattern = r"[a-z][a-z0-9_-]{0,31}"  # it names a folder
    c.JupyterHub.spawner_class = "simple"
    c.SimpleLocalProcessSpawner.home_dir_template = str(FOLDER / "homes/{username}")
    print(f"the class's password is in {password}", file=sys.stderr)

# What each gets ------------------------------------------------------------------------------------------------------

# Copied by the participant's own process, with their rights; what they have changed is never overwritten.
COPY = '(cd "$AISCALE_TREE" && find notebooks workshop/exercises workshop/clinic workshop/puzzles -type f '
COPY += '! -path "*/.*" ! -path "*/__pycache__/*" ! -path "*/mine/*" ! -path "*/progress/*") | while read -r each; '
COPY += 'do [ -e "$each" ] || { mkdir -p "${each%/*}" && cp "$AISCALE_TREE/$each" "$each"; }; done; '
# The clinic's checks are beside its solutions.
COPY += 'mkdir -p workshop/solutions && ln -sfn "$AISCALE_TREE/workshop/solutions/clinic" workshop/solutions/clinic; '
c.Spawner.cmd = ["/bin/sh", "-c", COPY + 'exec "$AISCALE_SERVER" "$@"', "sh"]
c.Spawner.environment = {
    "PATH": f"{BIN}:{os.environ.get('PATH', os.defpath)}",  # mpiexec, torchrun and aiscale are called by name
    "AISCALE_TREE": str(NOTEBOOKS.parent),
    "AISCALE_SERVER": str(BIN / "jupyterhub-singleuser"),
    "JUPYTER_CONFIG_PATH": str(NOTEBOOKS.parent / "workshop/jupyter"),  # JupyterLab asks nobody about its news
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait leave the cores to others
}
c.Spawner.default_url = "/lab/tree/notebooks/00_start_here.ipynb"
c.Spawner.mem_limit = os.environ.get("AISCALE_HUB_MEMORY", "3G")
c.Spawner.cpu_limit = float(os.environ.get("AISCALE_HUB_CORES", "2"))
# When a whole class comes in at once: so many start at the same time, and who comes next tries again by itself.
c.JupyterHub.concurrent_spawn_limit = 8
c.JupyterHub.spawn_throttle_retry_range = (5, 15)
c.Spawner.start_timeout = 120
c.Spawner.http_timeout = 120
c.Spawner.args = [
    # Memory of those who have gone: a kernel's ranks end with it.
    "--MappingKernelManager.cull_idle_timeout=3600",
    "--MappingKernelManager.cull_interval=300",
    "--ServerApp.shutdown_no_activity_timeout=7200",
]

# What stands beside the lessons ---------------------------------------------------------------------------------------

SITE = NOTEBOOKS.parent / "build" / "site"
PAGES = {"index.html": "the lessons, to read", "quiz.html": "quiz", "cheat_sheet.html": "cheat sheet"}
PAGES |= {"workshop/glossary.html": "glossary", "play/index.html": "planner, six tasks", "play/puzzle.html": "puzzle"}
c.JupyterHub.services = []
if links := [f'<a href="/services/class/{page}">{PAGES[page]}</a>' for page in PAGES if (SITE / page).exists()]:
    command = [sys.executable, str(NOTEBOOKS.parent / "workshop/serve_site.py")]
    c.JupyterHub.services.append({"name": "class", "url": "http://127.0.0.1:8766", "command": command})
    c.JupyterHub.template_vars = {"announcement": " · ".join(links)}  # on the page where people log in
else:
    print(f"people find no site, quiz or planner: there is no {SITE} (make workshop)", file=sys.stderr)

# The class's room -----------------------------------------------------------------------------------------------------

if address := os.environ.get("AISCALE_HUB_ROOM"):
    sys.path.insert(0, str(NOTEBOOKS.parent / "workshop"))
    from room.state import Room

    url, file = f"{address.rstrip('/')}/services/room", FOLDER / "room.json"
    room = Room(file)
    room.save()  # seats need the token before the room's server starts
    command = [str(BIN / "aiscale"), "room", "--port", "8765", "--url", url, "--file", str(file)]
    service = {"name": "room", "url": "http://127.0.0.1:8765", "command": command, "cwd": str(NOTEBOOKS.parent)}
    c.JupyterHub.services.append(service)
    c.Spawner.environment["AISCALE_ROOM"] = f"{url}/#{room.kept['seats_token']}"
    print(f"the addresses of wall and helpers end with the helpers_token of {file}:", file=sys.stderr)
    print(f"    {url}/wall#TOKEN {url}/helpers#TOKEN", file=sys.stderr)

# In a job of each person ---------------------------------------------------------------------------------------------

if account := os.environ.get("AISCALE_HUB_SLURM"):
    import batchspawner  # noqa: F401  # jobs tell the hub their port by what this adds to it

    c.JupyterHub.spawner_class = "batchspawner.SlurmSpawner"
    c.JupyterHub.hub_bind_url = f"http://:{os.environ.get('AISCALE_HUB_API_PORT', '8081')}"  # servers on nodes call it
    c.Spawner.cmd = ["jupyterhub-singleuser"]
    c.Spawner.start_timeout = 600  # in the queue too
    c.SlurmSpawner.batchspawner_singleuser_cmd = shlex.quote(str(BIN / "batchspawner-singleuser"))
    c.SlurmSpawner.req_options = f"--account={account} {os.environ.get('AISCALE_HUB_SBATCH', '')}".strip()
    c.SlurmSpawner.req_runtime = os.environ.get("AISCALE_HUB_TIME", "1:00:00")
    c.SlurmSpawner.req_memory, c.SlurmSpawner.req_nprocs = c.Spawner.mem_limit, f"{c.Spawner.cpu_limit:.0f}"
    c.SlurmSpawner.req_srun = ""  # srun does not take --cpus-per-task over from sbatch: the server would have one core
    c.SlurmSpawner.req_prologue = f'export PATH="{BIN}:$PATH" AISCALE_TREE="{NOTEBOOKS.parent}"; {COPY}'
