"""Ranks on virtual nodes, each with a network card that the kernel slows (Linux, root or user namespaces).

    status = start_on_nodes(4, ["-m", "aiscale.bench", ...])     # as `distributed.launch`, but on 4 nodes
    shape(100)                                                   # in a rank: its card, both ways, Mbit/s

A node is a network namespace with its own address; a virtual cable (veth) joins it to a bridge, the switch. All of it
lives in a private namespace that the kernel removes with the last process. tbf (token bucket filter) slows outgoing
traffic at the node's end of the cable and incoming traffic at the switch's end.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Sequence

from aiscale.distributed import host_store, launch
from aiscale.processes import die_with, network_namespace

_SWITCH, _NODE, _NOWHERE = "10.77.0.254", "10.77.0.{}", "10.78.0.0/24"
_SWITCH_PID = "AISCALE_SWITCH_PID"  #: environment variable of a rank: pid whose namespace holds the switch
#: Bytes of a frame, and how long one piece handed on by the kernel keeps the link busy (see `shape`).
_FRAME_BYTES, _PIECE_S = 1514, 0.4e-3
_QUEUE = "50ms"  #: buffers what several senders send to one card


@functools.cache
def why_no_nodes() -> str:
    """Why this machine cannot run virtual nodes with slowed links; empty if it can."""
    command, why = network_namespace()
    if not command:
        return f"nodes need Linux's unshare, ip and tc: {why}"
    probe = "ip link set lo up && tc qdisc replace dev lo root tbf rate 1mbit burst 64kb latency 50ms"
    done = subprocess.run([*command, "sh", "-c", probe], capture_output=True, text=True, timeout=20)
    return f"links cannot be slowed here: {done.stderr.strip()}" if done.returncode else ""


def start_on_nodes(nproc: int, argv: Sequence[str], *, timeout_s: float = 900) -> int:
    """Run `python ARGV` as `nproc` connected ranks, one per node; returns the exit status, 0 if all succeeded, 124
    if they took longer than `timeout_s`."""
    command = [*network_namespace()[0], sys.executable, "-m", "aiscale.bench.nodes", str(nproc), *argv]
    # There is no name server: torch would wait for one, and warn.
    env = {**os.environ, "RES_OPTIONS": "attempts:1 timeout:1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    try:
        return subprocess.run(
            command, env=env, timeout=timeout_s, preexec_fn=functools.partial(die_with, os.getpid())
        ).returncode
    except subprocess.TimeoutExpired:
        print(f"the ranks had not ended after {timeout_s:g} s and are killed", file=sys.stderr, flush=True)
        return 124


def plug_in() -> None:
    """Connect this rank's node to the switch; call it before anything else. Does nothing if there is no switch."""
    if _SWITCH_PID not in os.environ:
        return
    rank, port = int(os.environ["RANK"]), f"node{os.environ['RANK']}"
    peer = ("type", "veth", "peer", "name", "eth0", "netns", str(os.getpid()))
    _call(*_at_switch(), "ip", "link", "add", port, *peer)
    _call(*_at_switch(), "ip", "link", "set", port, "master", "switch", "up")
    _call("ip", "addr", "add", f"{_NODE.format(rank + 1)}/24", "dev", "eth0")
    _call("ip", "link", "set", "lo", "up")
    _call("ip", "link", "set", "eth0", "up")


def shape(rate_mbit_s: float) -> None:
    """Slow this rank's network card in both directions; 0 means unlimited."""
    # By default the kernel hands on pieces of 64 KiB, and each waits at both ends until the link could have carried all
    # of it: 2.6 ms at 200 Mbit/s for each message of an all-reduce. A cable carries single frames, but the kernel's
    # work is per piece: with four frames in a piece, two cores spend 0.4 s on an all-reduce of 11 MB on four ranks, at
    # any rate. So a piece is as large as the link carries in a short time.
    frames = int(min(max(rate_mbit_s * 1e6 * _PIECE_S / 8 / _FRAME_BYTES, 1), 43)) if rate_mbit_s else 65535
    burst = ("burst", str(max(2 * frames * _FRAME_BYTES, 16384)), "latency", _QUEUE)
    tbf = ("tbf", "rate", f"{rate_mbit_s * 1e6:.0f}bit", *burst)
    for where, device in (((), "eth0"), (_at_switch(), f"node{os.environ['RANK']}")):
        _call(*where, "ip", "link", "set", device, "gso_max_segs", str(frames))
        _call(*where, "tc", "qdisc", "replace", "dev", device, "root", *(tbf if rate_mbit_s else ("pfifo",)))
    # A change of routes makes connections look up their card again and send pieces of the new size. (Flushing the cache
    # does so too, but older kernels do not allow it in a user namespace.)
    for change in ("add", "del"):
        _call("ip", "route", change, "unreachable", _NOWHERE)


def _at_switch() -> tuple[str, ...]:
    return ("nsenter", "-t", os.environ[_SWITCH_PID], "-n")


def _call(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _serve(nproc: int, argv: Sequence[str]) -> int:
    """Build the switch, start the ranks and wait for them. Runs as root of a new namespace."""
    _call("ip", "link", "set", "lo", "up")
    _call("ip", "link", "add", "switch", "type", "bridge")
    _call("ip", "addr", "add", f"{_SWITCH}/24", "dev", "switch")
    _call("ip", "link", "set", "switch", "up")
    store, rendezvous = host_store(address=_SWITCH)
    env = {**rendezvous, _SWITCH_PID: str(os.getpid()), "GLOO_SOCKET_IFNAME": "eth0"}
    moving = "import os, sys; os.execvp('unshare', ['unshare', '--net', sys.executable, *sys.argv[1:]])"
    try:
        return launch(nproc, ["-c", moving, *argv], env)
    finally:
        del store


if __name__ == "__main__":
    raise SystemExit(_serve(int(sys.argv[1]), sys.argv[2:]))
