"""What ranks inherit from the user's environment, and would hang or fail on.

    shorten_temporary_folder()   before ranks start: their sockets lie there, by a short path
    meet_at_loopback()           before a lesson calls torchrun: its ranks meet at this host's name

Only the standard library: every command of `aiscale` imports it.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
from contextlib import suppress

#: Characters of a socket's path (sun_path, without its last zero).
SOCKET_PATH = 103 if sys.platform == "darwin" else 107
#: Behind the temporary folder multiprocessing's and torch's sockets have up to 34 characters.
LONGEST_FOLDER = 64
#: torchrun reads its option --local-addr from it: this node's address, at which all ranks meet.
LOCAL_ADDRESS = "PET_LOCAL_ADDR"
linked = ""  #: the long temporary folder to which this process has made a short link
_LOOKUP_S = 2.0  #: for a name server; torchrun asks it again and again


def shorten_temporary_folder() -> None:
    """Where the temporary folder has a long path, make this process and its children use a link to
    it. The link lies in a folder that only this user can enter, and goes when this process ends."""
    if len(os.environ.get("TMPDIR", "")) <= LONGEST_FOLDER:
        return
    global linked
    import tempfile
    from multiprocessing import util

    long = tempfile.gettempdir()  # not TMPDIR where that does not exist
    if len(os.fsencode(long)) <= LONGEST_FOLDER:
        return
    with suppress(OSError):  # without /tmp ranks say what fails
        private = tempfile.mkdtemp(prefix="aiscale-", dir="/tmp")
        # Multiprocessing removes its own folder behind the link at -100.
        util.Finalize(None, shutil.rmtree, (private, True), exitpriority=-200)
        short = os.path.join(private, "tmp")
        os.symlink(long, short)
        os.environ["TMPDIR"] = tempfile.tempdir = short
        linked = long


def meet_at_loopback() -> None:
    """Make torchrun's ranks meet at the loopback where this machine's name leads nowhere.

    There they would wait for minutes, as on a laptop without a network."""
    if LOCAL_ADDRESS not in os.environ and not name_leads_here():
        os.environ[LOCAL_ADDRESS] = "127.0.0.1"


def name_leads_here() -> bool:
    """Whether this machine's name resolves to an address of its own; False if nobody answers."""
    found = []
    lookup = threading.Thread(target=_look_up, args=(found,), daemon=True)
    lookup.start()
    lookup.join(_LOOKUP_S)
    return bool(found)


def _look_up(found: list) -> None:
    """Append the first address of this machine's name at which a socket can be bound."""
    with suppress(OSError, UnicodeError):
        name = socket.getfqdn()
        for family, kind, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                found.append(address)
                return
