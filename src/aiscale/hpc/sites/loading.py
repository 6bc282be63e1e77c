"""Reading a site profile from its TOML file, strictly: an unknown key is an error that names the nearest valid one."""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import functools
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path

from aiscale.hpc.sites.profile import Site, SiteError

_HERE = Path(__file__).parent


def names() -> list[str]:
    """The sites that are shipped."""
    return sorted(path.stem for path in _HERE.glob("*.toml"))


@functools.cache
def site(name: str) -> Site:
    """The shipped profile of that name; raises SiteError, naming the nearest, if there is none."""
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1, cutoff=0.4)
        raise SiteError(f"unknown site {name!r}: " + (f"did you mean {near[0]}?" if near else f"there are {_list()}"))
    return load(_HERE / f"{name}.toml")


def here() -> Site | None:
    """The site that this machine belongs to: the one that AISCALE_SITE says, by name or .toml file, else the one whose
    marks the environment bears; None if there is no telling."""
    if said := os.environ.get("AISCALE_SITE"):
        return find(said)
    shipped = map(site, names())
    return next((one for one in shipped if one.marks and one.marks.items() <= os.environ.items()), None)


def find(text: str) -> Site:
    """The shipped profile of that name, or the one in that .toml file."""
    return load(text) if text.endswith(".toml") else site(text)


def _list() -> str:
    return ", ".join(names())


def load(path: str | Path) -> Site:
    """The profile in a file; raises SiteError with one line that says what is wrong with it."""
    try:
        tree = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise SiteError(
            f"site profile {path}: {(error.strerror or str(error)).lower()}; shipped are {_list()}, "
            f"to copy from {_HERE.name}/"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SiteError(f"site profile {path} is no TOML: {error}") from None
    try:
        return _build(Site, tree, "")
    except SiteError as error:
        raise SiteError(f"site profile {path}: {error}") from None


def _build(cls: type, tree: object, prefix: str):
    if not isinstance(tree, dict):
        raise SiteError(f"{prefix.rstrip('.')} is {tree!r}: it must be a table")
    hints, fields = typing.get_type_hints(cls), {field.name: field for field in dataclasses.fields(cls)}
    for key in tree:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.4)
            raise SiteError(f"unknown key {prefix}{key}: " + (f"did you mean {near[0]}?" if near else _valid(fields)))
    for name, field in fields.items():
        if name not in tree and field.default is field.default_factory is dataclasses.MISSING:
            raise SiteError(f"{prefix}{name} is missing: {_valid(fields)}")
    return cls(**{key: _convert(hints[key], value, prefix + key) for key, value in tree.items()})


def _valid(fields: Mapping[str, object]) -> str:
    return f"a profile has {', '.join(fields)} here"


def _convert(kind, value: object, path: str):
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, path + ".")
    if origin is tuple:
        if not isinstance(value, list):
            raise SiteError(f"{path} is {value!r}: it must be a list")
        return tuple(_convert(inner[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, dict):
            raise SiteError(f"{path} is {value!r}: it must be a table")
        return types.MappingProxyType({key: _convert(inner[1], item, f"{path}.{key}") for key, item in value.items()})
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", datetime.date: "a date"}
        raise SiteError(f"{path} is {value!r}: it must be {words[kind]}")
    return value
