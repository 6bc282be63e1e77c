"""How a command refuses and how it ends: one line that says what to do, and no half-written file.

    parser = Parser(prog="aiscale")          # "unknown command 'trian': did you mean train?", exit status 2
    status = ended(command)                  # errors as one line; Ctrl-C and SIGTERM let `finally` blocks clean up

The exit status is 2 after a refusal, 1 with the traceback of a fault of ours, 130 after Ctrl-C, 143 after SIGTERM, 141
if nobody reads standard output any more (`aiscale ... | head`).
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from aiscale.config import hint

BAD_INPUT, INTERRUPTED, TERMINATED, NO_READER = 2, 130, 143, 141

_KINDS = {"int": "a whole number", "float": "a number"}
_REMEDIES = {
    "free some space, or choose another place": (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    "choose a place where you may write": (errno.EACCES, errno.EPERM, errno.EROFS),
    "check the path": (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
    "close what has files open, or raise the limit (ulimit -n)": (errno.EMFILE, errno.ENFILE),
    "the disk or its file system is faulty: choose another place": (errno.EIO, errno.ESTALE),
}


def ended(command: Callable[[], int | None]) -> int:
    """Run a command; returns its exit status, whatever happens."""
    try:
        with ending_in_order():
            status = command() or 0
        if status == INTERRUPTED:  # `train` takes Ctrl-C itself, and saves
            _ignore_interrupts()
    except KeyboardInterrupt:
        print("aiscale: interrupted", file=sys.stderr)
        status = INTERRUPTED
    except SystemExit as end:  # from argparse, or SIGTERM
        status = end.code or 0
        if status == TERMINATED:
            print("aiscale: ended by SIGTERM", file=sys.stderr)
    except Exception as error:
        status = _fail(error)
    unwritten = _close_output()
    return status or unwritten


def _fail(error: Exception) -> int:
    """Print the error, and end this rank so that no other rank waits for it; returns the exit status."""
    if isinstance(error, BrokenPipeError):  # `aiscale ... | head`
        return _drop_output()
    if "aiscale.distributed" not in sys.modules and not may_be_a_rank():  # it imports torch, which takes two seconds
        return _say("", error)
    return _fail_as_a_rank(error)


def _fail_as_a_rank(error: Exception) -> int:
    from aiscale.distributed import LOST_STATUS, ConnectError, end_now, find_launch, lost_another_rank

    if isinstance(error, ConnectError) and not getattr(error, "failed_alike", False):
        print(f"aiscale: {error}", file=sys.stderr)
        return BAD_INPUT
    place = find_launch(os.environ)
    alone = not getattr(error, "failed_alike", True)  # set by fit; before ranks connect they all fail alike
    who = f"rank {place.rank} of {place.size}: " if alone else ""
    status = BAD_INPUT
    if place.size > 1 and lost_another_rank(error):
        gone = ", ".join(map(str, getattr(error, "gone", [])))
        what = f"rank {gone}, which has ended" if gone else "another rank, whose own message says why"
        print(f"aiscale: {who}lost its connection to {what}", file=sys.stderr)
        status = LOST_STATUS
    elif alone or place.rank == 0 or not _one_line(error):
        status = _say(who, error)
    if alone:
        end_now(status)
    return status


def _say(who: str, error: Exception) -> int:
    """Print the error, in one line unless it is a fault of ours; returns the exit status."""
    if line := _one_line(error):
        print(f"aiscale: {who}{line}", file=sys.stderr)
        return BAD_INPUT
    traceback.print_exception(error)
    return 1


def _one_line(error: Exception) -> str:
    """What a user needs to know of an error of ours or of the file system; empty if only its traceback tells."""
    if type(error).__module__.startswith("aiscale."):
        return str(error)
    number = getattr(error, "errno", None)
    remedy = next((remedy for remedy, numbers in _REMEDIES.items() if number in numbers), "")
    if not isinstance(error, OSError) or not remedy:
        return ""
    what = f"{error.filename} cannot be used" if error.filename else "a file, or standard output, cannot be written"
    return f"{what} ({error.strerror}): {remedy}"


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose errors are one line that names the nearest valid word."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {self._plainly(message)}\n")

    def parse_known_args(self, args=None, namespace=None):
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            known = [option for action in self._actions for option in action.option_strings]
            if rest[0].startswith("-"):
                self.error(f"unknown option {rest[0]}: {hint(rest[0].split('=')[0], known, self._help())}")
            self.error(f"{rest[0]!r} is one word too many: {self._help()}")
        return found, rest

    def _help(self) -> str:
        return f"{self.prog} --help lists what there is"

    def _plainly(self, message: str) -> str:
        """argparse's message as one of ours: what was given, the rule, and what to do."""
        if found := re.fullmatch(r"argument (\S+): invalid choice: '(.*?)' \(choose from (.*)\)", message, re.S):
            name, value, choices = found.groups()
            what = f"{name} is {value!r}" if name.startswith("-") else f"unknown {name.lower()} {value!r}"
            known = re.findall("'([^']+)'", choices)
            return f"{what}: {hint(value, known)}"
        if found := re.fullmatch(r"argument (\S+): invalid (\w+) value: (.*)", message, re.S):
            name, kind, value = found.groups()
            return f"{name} is {value}: it must be {_KINDS.get(kind, kind)}"
        if found := re.fullmatch(r"the following arguments are required: (.*)", message):
            return f"{found[1]} is missing: {self._help()}"
        if found := re.fullmatch(r"argument (\S+): expected .*", message):
            return f"{found[1]} needs a value: {self._help()}"
        if found := re.fullmatch(r"argument (\S+): not allowed with argument (\S+)", message):
            return f"{found[1]} and {found[2]} exclude each other: give one of them"
        return message


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt and SIGTERM raise SystemExit, so that a command removes what it has begun to
    write. A second Ctrl-C does not disturb that; a third does.

    SIGTERM still kills a rank: it may wait for others in C++, where Python hears no signal."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread
        return
    presses = []

    def interrupt(number: int, frame) -> None:
        presses.append(number)
        if len(presses) != 2:
            raise KeyboardInterrupt
        print("aiscale: ending; a third Ctrl-C ends at once", file=sys.stderr, flush=True)

    def terminate(number: int, frame) -> NoReturn:
        raise SystemExit(TERMINATED)

    wanted = {signal.SIGINT: (signal.default_int_handler, interrupt)}
    if not may_be_a_rank():
        wanted[signal.SIGTERM] = (signal.SIG_DFL, terminate)
    # A handler that somebody else has set, or that a shell has told to ignore, stays.
    before = {}
    try:
        for number, (old, new) in wanted.items():
            if signal.getsignal(number) == old:
                before[number] = signal.signal(number, new)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if presses:
            _ignore_interrupts()


def _ignore_interrupts() -> None:
    """Only Python's own end remains, which another Ctrl-C must not disturb."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # at its end Python undoes the line above


def may_be_a_rank() -> bool:
    """Whether a launcher seems to have started this process; without importing torch, which takes two seconds."""
    return any("RANK" in name or name == "SLURM_PROCID" for name in os.environ)


def _close_output() -> int:
    """Flush standard output; returns an exit status if it cannot be written, else 0."""
    try:
        if sys.stdout:
            sys.stdout.flush()
        return 0
    except BrokenPipeError:
        return _drop_output()
    except OSError as error:
        _drop_output()
        return _say("", error)


def _drop_output() -> int:
    """Send what standard output still holds to nowhere, or Python would complain again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return NO_READER
