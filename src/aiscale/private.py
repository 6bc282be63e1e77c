"""Folders in /tmp that belong to this user alone.

Whoever can write into a folder from which code is loaded runs code as the user who loads it, and
whoever can write to the place where ranks meet can join them. A name in /tmp that everybody can
guess proves nothing: a stranger may have made that folder first. So its owner and mode are checked.
`python -m aiscale train` and `cluster.start` call this.
"""

from __future__ import annotations

import os
import stat
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

#: Names the file at which the ranks of one machine meet (`distributed.rendezvous`).
STORE = "AISCALE_STORE"
#: Compiled code is loaded from there; torch's default is a name in /tmp that everybody can guess.
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def named_folder() -> Path:
    """The folder of this user, made if it is missing.

    All processes of this machine compute the same name. Raises PermissionError, with a remedy, if
    others could write there.
    """
    path = Path(tempfile.gettempdir(), f"aiscale-{os.getuid()}")
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    seen = path.lstat()  # of a link itself, not of what it leads to
    mine = stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.getuid()
    if not mine or stat.S_IMODE(seen.st_mode) != 0o700:
        raise PermissionError(
            f"{path} is of user {seen.st_uid} with mode {stat.S_IMODE(seen.st_mode):o}, and "
            f"must be a folder of user {os.getuid()} with mode 700: remove it, or set TMPDIR "
            "to a folder of your own"
        )
    return path


def folder() -> Path:
    """`named_folder`, or a new folder where somebody else has taken its name."""
    try:
        return named_folder()
    except PermissionError:
        return Path(tempfile.mkdtemp(prefix="aiscale-"))


def new_store() -> Path:
    """The name of a file for a new rendezvous store."""
    return folder() / f"store-{uuid.uuid4().hex}"


def keep_caches_private() -> None:
    """Let this process, and those it starts, keep compiled code where nobody else can write."""
    if _COMPILED not in os.environ:
        os.environ[_COMPILED] = str(folder() / "inductor")
