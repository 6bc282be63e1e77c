"""Stands in for batchspawner, which the lock does not hold: its traits, its batch script's options, its commands.

It starts a person's server in a job, as batchspawner does, but chooses the port on the hub's side.
"""

from __future__ import annotations

import asyncio

import jinja2
from jupyterhub.spawner import Spawner
from jupyterhub.utils import random_port
from traitlets import Unicode

SCRIPT = """#!/bin/bash
#SBATCH --output={{homedir}}/jupyterhub_slurmspawner_%j.log
#SBATCH --job-name=spawner-jupyterhub
#SBATCH --chdir={{homedir}}
#SBATCH --export={{keepvars}}
#SBATCH --time={{runtime}}
#SBATCH --mem={{memory}}
#SBATCH --cpus-per-task={{nprocs}}
#SBATCH {{options}}
set -euo pipefail
{{prologue}}
{% if srun %}{{srun}} {% endif %}{{cmd}}
"""


class SlurmSpawner(Spawner):
    exec_prefix = Unicode("sudo -E -u {username}").tag(config=True)
    batchspawner_singleuser_cmd = Unicode("batchspawner-singleuser").tag(config=True)
    req_homedir = Unicode().tag(config=True)
    req_runtime = Unicode().tag(config=True)
    req_memory = Unicode().tag(config=True)
    req_nprocs = Unicode().tag(config=True)
    req_options = Unicode().tag(config=True)
    req_prologue = Unicode().tag(config=True)
    req_srun = Unicode("srun").tag(config=True)
    job = ""

    async def ask(self, words: str, said: str = "") -> str:
        pipe = asyncio.subprocess.PIPE
        words = f"{self.exec_prefix.format(username=self.user.name)} {words}"
        process = await asyncio.create_subprocess_shell(words, env=self.get_env(), stdin=pipe, stdout=pipe)
        told = (await process.communicate(said.encode()))[0].decode().strip()
        if process.returncode:
            raise RuntimeError(f"{words} ended with {process.returncode}")
        return told

    async def start(self) -> tuple[str, int]:
        self.ip, self.port = "0.0.0.0", random_port()
        asked = {name.removeprefix("req_"): getattr(self, name) for name in self.trait_names(config=True)}
        command = " ".join([*self.cmd, *self.get_args()])
        script = jinja2.Template(SCRIPT).render(asked, keepvars=",".join(self.get_env()), cmd=command)
        self.job = await self.ask("sbatch --parsable", script)
        while not (node := await self.ask(f"squeue -h -t RUNNING -j {self.job} -o %B")):
            await asyncio.sleep(0.5)
        return node, self.port

    async def poll(self) -> int | None:
        return None if self.job and await self.ask(f"squeue -h -j {self.job} -o %T") else 1

    async def stop(self, now: bool = False) -> None:
        await self.ask(f"scancel {self.job}")
