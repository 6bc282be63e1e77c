"""Checks of values and of folders, which raise `ConfigError`; files written whole or not at all."""

from __future__ import annotations

import difflib
import errno
import os
import tempfile
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path


class ConfigError(ValueError):
    """A configuration that cannot be trained; the message is one line that says what to change."""


def hint(word: str, names: Iterable[str], none: str = "", prefix: str = "") -> str:
    """`did you mean X?` for the nearest known word; if none is near, `none` or the list of all."""
    names = list(names)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    guess = f"did you mean {prefix}{near[0]}?" if near else ""
    if difflib.get_close_matches(word, near, cutoff=0.6):
        return guess
    every = "it may be one of " + ", ".join(prefix + name for name in names)
    return f"{guess} {none or every}".strip()


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def require_positive(section: str, config: object, names: str) -> None:
    for name in names.split():
        value = getattr(config, name)
        require(
            value is None or value > 0, f"{section}.{name} is {value}: it must be greater than 0"
        )


def require_not_negative(section: str, config: object, names: str) -> None:
    for name in names.split():
        value = getattr(config, name)
        require(value >= 0, f"{section}.{name} is {value}: it must not be negative")


def require_writable(folder: str | Path, option: str) -> None:
    """Refuse a folder in which nothing can be written, before the work whose result goes there.

    Creates nothing.
    """
    whole = Path(folder).absolute()
    there = next(path for path in (whole, *whole.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there) as trial:
            trial.write(b"x")
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror}): {remedy(error, option)}"
        ) from None


def remedy(error: OSError, option: str) -> str:
    """What to do about an error of writing.

    `option` names another folder (empty: a word of the command does).
    """
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return "free some space, or " * full + "name another folder" + f" with {option}" * bool(option)


def write_whole(file: Path, text: str, mode: int | None = None) -> Path:
    """Write all of the text or leave the file unchanged, whatever happens; returns the file."""
    if file.exists() and not file.is_file():  # such as /dev/stdout
        file.write_text(text, encoding="utf-8")
        return file
    file = file.resolve()  # a link stays one
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        if mode:
            partial.chmod(mode)
        return partial.replace(file)
    finally:
        with suppress(OSError):
            partial.unlink()


def refuse_options_of_others(
    section: str, config: object, chooser: str, owners: Mapping[str, Collection[str]]
) -> None:
    """Refuse an option that the chosen strategy or method (the field `chooser`) would ignore.

    owners: option -> choices that have it.
    """
    chosen = getattr(config, chooser)
    defaults = {field.name: field.default for field in fields(config)}
    for name, choices in owners.items():
        value = getattr(config, name)
        require(
            value == defaults[name] or chosen in choices,
            f"{section}.{name} is {value}, but {section}.{chooser} {chosen} has no such option: "
            f"set it to {defaults[name]}, or {chooser} to {' or '.join(choices)}",
        )
