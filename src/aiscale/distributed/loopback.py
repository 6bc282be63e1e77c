"""Ranks of one machine meet at its loopback, and then listen nowhere else: neither the store nor gloo is for others.

Left to themselves the store listens on every network of the machine and gloo at the address of its host name, to
anybody who can reach it, and without a key.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import sys

import psutil

_CHOICE = "GLOO_SOCKET_IFNAME"
_OURS = "AISCALE_GLOO_INSIDE"  #: what we have chosen, for whoever inherits it

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

_stores: dict = {}  #: by address and port; a second world of this process meets at the same one


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def choose_gloo_interface(meeting_point: str) -> None:
    """Have gloo listen on the loopback where ranks meet there, unless somebody has chosen otherwise.

    Where they meet elsewhere gloo looks its own host name up. If that leads to nowhere but this machine, as it does on
    many, gloo is told the network card that leads to the others.
    """
    ours = os.environ.pop(_OURS, None)  # from an earlier world, or from the process that started a job
    if ours and os.environ.get(_CHOICE) == ours:
        del os.environ[_CHOICE]
    if _CHOICE in os.environ:
        return
    if is_loopback(meeting_point):
        card = _LOOPBACK
    elif not _found_by_name():
        card = _card_towards(meeting_point)
    else:
        return
    os.environ[_CHOICE] = os.environ[_OURS] = card


def _card_towards(host: str) -> str:
    """The network card over which `host` is reached; the loopback where it is this machine, or not reached at all."""
    try:
        # A datagram socket sends nothing when it is connected: the system only says from where it would.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            address = probe.getsockname()[0]
    except OSError:
        return _LOOPBACK
    cards = (name for name, own in psutil.net_if_addrs().items() if any(each.address == address for each in own))
    return next(cards, _LOOPBACK)


def _found_by_name() -> bool:
    """Whether other machines would find this one at its host name's address that gloo takes, the first of its own."""
    try:
        named = [address[0] for *_, address in socket.getaddrinfo(socket.gethostname(), None)]
    except OSError:
        return False
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    first = next((address for address in named if address in own), None)
    return first is not None and not is_loopback(first)


def private_store(host: str, port: int, rank: int, timeout: datetime.timedelta):
    """Rank 0's store where ranks of one machine meet, if none is there yet; None where torch's way is right.

    Raises OSError if the port is taken.
    """
    from torch.distributed import TCPStore

    if rank or not is_loopback(host) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    if (host, port) not in _stores:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024)
        how = {"is_master": True, "wait_for_workers": False, "timeout": timeout}
        _stores[host, port] = TCPStore(host, port, master_listen_fd=listener.detach(), **how)
    return _stores[host, port]
