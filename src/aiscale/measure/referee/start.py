"""Starts one rank of a run: `probe` with a script, in an environment of its own."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

from aiscale import processes

#: What each rank needs is imported once, by the process from which ranks are forked.
_PRELOAD = ("torch._dynamo", "torch.distributed.tensor", "aiscale.measure.traffic")
MARK = "AISCALE_REFEREE"  #: in the environment of all that a run starts


def start_rank(
    folder: Path, work: Path, words: list[str], rank: int, meet: Mapping[str, str]
) -> BaseProcess:
    """A rank that `folder/settings.json` says how to watch. `words`: the script and its arguments;
    `meet`: where the ranks meet, and how many they are."""
    environment = _environment(meet)
    processes.warm_up(_PRELOAD, environment)  # without the mark: it outlives this run
    environment |= {"LOCAL_RANK": str(rank)} | environment
    environment |= {MARK: str(folder), "RANK": str(rank)}
    command = ["-m", "aiscale.measure.referee.probe", str(folder / "settings.json"), str(rank)]
    out, err = folder / f"out{rank}", folder / f"err{rank}"
    with out.open("wb") as said, err.open("wb") as complained:
        return processes.start_python(
            [*command, *words],
            environment,
            preload=_PRELOAD,
            name=f"rank {rank}",
            cwd=work,
            stdout=said.fileno(),
            stderr=complained.fileno(),
        )


def meeting_place(ranks: int) -> dict[str, str]:
    """On the loopback interface of this machine."""
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }


def _environment(meet: Mapping[str, str]) -> dict[str, str]:
    foreign = ("TORCHELASTIC_", "SLURM_", "LOCAL_RANK")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    path = [os.path.abspath(each) for each in kept.get("PYTHONPATH", "").split(os.pathsep) if each]
    kept |= {
        "OMP_NUM_THREADS": "1",  # sums in the same order, however busy the machine is
        "PYTHONPATH": os.pathsep.join(path),  # the ranks run in another folder
    }
    return kept | dict(meet)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]
