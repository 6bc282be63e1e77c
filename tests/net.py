"""Ranks in a private network namespace, so that nothing else sends on their loopback."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path


@functools.cache
def network_namespace() -> tuple[list[str], str]:
    """(command that runs a program in a new network namespace, ""), or ([], why there is none)."""
    why = "no unshare here"
    for command in (["unshare", "--net"], ["unshare", "--map-root-user", "--net"]):
        if not shutil.which("unshare"):
            break
        done = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=20)
        if done.returncode == 0:
            return command, ""
        why = f"network namespaces are not allowed here: {done.stderr.strip()}"
    return [], why


RANK = """
import os, time, torch, torch.distributed as dist
from aiscale.measure.distributed import connect
world = connect("cpu")

def interface_bytes():  # sent on the loopback so far
    (line,) = [line for line in open("/proc/net/dev") if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])

def settled():  # what gloo and the store still send ends within some milliseconds
    dist.barrier()
    time.sleep(0.05)
    now = interface_bytes()
    dist.barrier()
    return now
"""

LAUNCH = """
import fcntl, socket, struct, sys
# the new namespace's loopback is down: set IFF_UP
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    fcntl.ioctl(s, 0x8914, struct.pack("16sh", b"lo", 1))
from aiscale.launch import launch
raise SystemExit(launch(int(sys.argv[1]), [sys.argv[2]]))
"""


def run_in_namespace(
    code: str, n: int, folder: Path, timeout: float = 120
) -> subprocess.CompletedProcess:
    """Run `code` as n ranks on a private loopback, with `world`, `interface_bytes`, `settled`."""
    script, launch = folder / "ranks.py", folder / "launch.py"
    script.write_text(RANK + code + "\nworld.close()\n")
    launch.write_text(LAUNCH)
    command = [*network_namespace()[0], sys.executable, str(launch), str(n), str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, cwd=folder, env=env
    )
