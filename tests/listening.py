"""Listening sockets, environments and children of processes on this machine, from /proc."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

_LISTEN = "0A"


def beyond_loopback(pids: Iterable[int]) -> list[str]:
    """The TCP sockets on which these processes listen where other machines may reach them."""
    return [
        f"{pid}: {address}"
        for pid, address in sockets(pids)
        if not ipaddress.ip_address(address).is_loopback
    ]


def sockets(pids: Iterable[int]) -> list[tuple[int, str]]:
    found = []
    for pid in pids:
        addresses = _listening(pid)  # of the process's network namespace
        found += [(pid, addresses[inode]) for inode in _inodes(pid) if inode in addresses]
    return found


def command_lines(pids: Iterable[int]) -> str:
    return "\n".join(_read(pid, "cmdline").replace("\0", " ") for pid in pids)


def environment(pid: int) -> dict[str, str]:
    pairs = (line.partition("=") for line in _read(pid, "environ").split("\0"))
    return {name: value for name, _, value in pairs}


def descendants(pid: int) -> list[int]:
    """The process and its descendants, except those that detached themselves."""
    import psutil

    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def _listening(pid: int) -> dict[str, str]:
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in _read(pid, f"net/{table}").splitlines()[1:]
    ]
    return {line[9]: _address(line[1].partition(":")[0]) for line in lines if line[3] == _LISTEN}


def _address(text: str) -> str:
    """Decode an address of /proc/net: 32-bit words in the machine's byte order."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    raw = struct.pack(f"={len(words)}I", *words)
    address = ipaddress.ip_address(
        socket.inet_ntop(socket.AF_INET6 if len(raw) == 16 else socket.AF_INET, raw)
    )
    return str(getattr(address, "ipv4_mapped", None) or address)


def _inodes(pid: int) -> set[str]:
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # the process has ended
        return set()
    targets = (_target(f"/proc/{pid}/fd/{descriptor}") for descriptor in descriptors)
    return {target[8:-1] for target in targets if target.startswith("socket:[")}


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
