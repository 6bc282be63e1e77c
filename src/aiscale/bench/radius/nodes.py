"""Ranks on nodes of their own, each with a network card that the kernel slows (Linux, root or user namespaces).

    status = start_on_nodes(4, ["-m", "aiscale.bench.radius.link", "rank", ...])     # as `dist.launch`, but on 4 nodes
    shape(100)                                                                # in a rank: its card, both ways, Mbit/s

A node is a network namespace with an address of its own; a virtual cable joins it to a bridge. All this lives in a
namespace that nobody else sees and that the kernel takes away with the last process. What leaves a node is slowed by
tbf (token bucket filter) at its end of the cable, what arrives at the bridge's end.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from aiscale.distributed.forking import die_with
from aiscale.distributed.spawn import rank_environment

_SWITCH, _NODE, _NOWHERE = "10.77.0.254", "10.77.0.{}", "10.78.0.0/24"
#: Bytes of a frame, and how long the link is busy with what the kernel hands on in one piece (see `shape`).
_FRAME_BYTES, _PIECE_S = 1514, 0.4e-3
_QUEUE = "50ms"  #: takes what several senders pour into one card


def _namespace_commands() -> list[list[str]]:
    as_root = ["unshare", "--net"]
    return [as_root] if os.geteuid() == 0 else [["unshare", "--map-root-user", "--net"], as_root]


@functools.cache
def _find_namespace() -> tuple[list[str], str]:
    """(the command that gives a network namespace in which links can be slowed, "") or ([], why there is none)."""
    why = "nodes need Linux's unshare, ip and tc"
    probe = "ip link set lo up && tc qdisc replace dev lo root tbf rate 1mbit burst 64kb latency 50ms"
    for command in _namespace_commands():
        try:
            done = subprocess.run([*command, "sh", "-c", probe], capture_output=True, text=True, timeout=20)
        except OSError:
            break
        if done.returncode == 0:
            return command, ""
        why = f"network namespaces with slowed links are not allowed here: {done.stderr.strip()}"
    return [], why


def why_no_nodes() -> str:
    """Why this machine gives us no nodes; empty if it does."""
    return _find_namespace()[1]


def start_on_nodes(nproc: int, argv: Sequence[str], *, timeout_s: float = 900) -> int:
    """Run `python ARGV` as `nproc` joined ranks, one on each of as many nodes; the exit status, 0 if all were, 124 if
    they took longer than `timeout_s`."""
    command = [*_find_namespace()[0], sys.executable, "-m", "aiscale.bench.radius.nodes", str(nproc), *argv]
    # No name server can be asked there: torch would wait for one, and warn.
    env = {**os.environ, "RES_OPTIONS": "attempts:1 timeout:1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with subprocess.Popen(command, env=env, preexec_fn=functools.partial(die_with, os.getpid())) as process:
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            print(f"the ranks had not ended after {timeout_s:g} s and are killed", file=sys.stderr, flush=True)
            return 124
        finally:
            process.kill()


def shape(rate_mbit_s: float) -> None:
    """Slow this rank's network card in both directions; 0: as fast as the machine is."""
    switch = ["nsenter", "-t", os.environ["AISCALE_SWITCH_PID"], "-n"]
    # Left to itself the kernel hands on pieces of 64 KiB, and each would wait at either end until the link could have
    # brought all of it: 2.6 ms at 200 Mbit/s for each of an all-reduce's messages. A cable carries single frames, but
    # the kernel's work is by the piece: with frames by four, two cores spend 0.4 s on an all-reduce of 11 MB on four
    # ranks, whatever the rate. So a piece is what the link brings in a short time.
    frames = int(min(max(rate_mbit_s * 1e6 * _PIECE_S / 8 / _FRAME_BYTES, 1), 43)) if rate_mbit_s else 65535
    burst = ("burst", str(max(2 * frames * _FRAME_BYTES, 16384)), "latency", _QUEUE)
    tbf = ("tbf", "rate", f"{rate_mbit_s * 1e6:.0f}bit", *burst)
    for where, device in (([], "eth0"), (switch, f"node{os.environ['RANK']}")):
        _call(*where, "ip", "link", "set", device, "gso_max_segs", str(frames))
        _call(*where, "tc", "qdisc", "replace", "dev", device, "root", *(tbf if rate_mbit_s else ("pfifo",)))
    # A change of routes makes connections look at their card anew, and send pieces of the new size. (Flushing what is
    # cached does so too, but older kernels allow that to nobody in a user namespace.)
    for change in ("add", "del"):
        _call("ip", "route", change, "unreachable", _NOWHERE)


def _call(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _serve(nproc: int, argv: Sequence[str]) -> int:
    """Be the switch: build it, start the ranks, wait for them. Runs as root of a namespace of its own."""
    import torch.distributed as dist

    _call("ip", "link", "set", "lo", "up")
    _call("ip", "link", "add", "switch", "type", "bridge")
    _call("ip", "addr", "add", f"{_SWITCH}/24", "dev", "switch")
    _call("ip", "link", "set", "switch", "up")
    store = dist.TCPStore(_SWITCH, 0, is_master=True, wait_for_workers=False)
    rendezvous = {"MASTER_ADDR": _SWITCH, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared = {"AISCALE_LAUNCHER": "aiscale", "AISCALE_SWITCH_PID": str(os.getpid()), "GLOO_SOCKET_IFNAME": "eth0"}
    ranks = []
    for rank in range(nproc):
        env = {**os.environ, **shared, **rendezvous, **rank_environment(rank, nproc)}
        ranks.append(_start_rank(rank, argv, env))
    try:
        while any(process.poll() is None for process in ranks) and not any(process.poll() for process in ranks):
            time.sleep(0.1)
        return next((status for process in ranks if (status := process.poll())), 0)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        del store


def _start_rank(rank: int, argv: Sequence[str], env: dict[str, str]) -> subprocess.Popen:
    """A process on a new node that is joined to the switch."""
    waiting = ["sh", "-c", 'read plugged && exec "$@"', "sh", sys.executable, *argv]
    process = subprocess.Popen(
        ["unshare", "--net", *waiting],
        env=env,
        stdin=subprocess.PIPE,
        preexec_fn=functools.partial(die_with, os.getpid()),
    )
    own = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{process.pid}/ns/net") == own:
        time.sleep(0.01)
    node, port = ["nsenter", "-t", str(process.pid), "-n"], f"node{rank}"
    _call("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
    _call("ip", "link", "set", port, "master", "switch", "up")
    _call(*node, "ip", "addr", "add", f"{_NODE.format(rank + 1)}/24", "dev", "eth0")
    _call(*node, "ip", "link", "set", "lo", "up")
    _call(*node, "ip", "link", "set", "eth0", "up")
    process.stdin.write(b"plugged\n")
    process.stdin.close()
    return process


if __name__ == "__main__":
    raise SystemExit(_serve(int(sys.argv[1]), sys.argv[2:]))
