"""Checks of configuration values; they raise `ConfigError`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields


class ConfigError(ValueError):
    """A configuration that cannot be trained; the message is one line that says what to change."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def require_positive(section: str, config: object, names: str) -> None:
    for name in names.split():
        value = getattr(config, name)
        require(value is None or value > 0, f"{section}.{name} is {value}: it must be greater than 0")


def refuse_options_of_others(section: str, config: object, chooser: str, owners: Mapping[str, Collection[str]]) -> None:
    """Refuse an option that the chosen strategy or method (the field `chooser`) would ignore.

    owners: {option: the choices that have it}.
    """
    chosen, defaults = getattr(config, chooser), {field.name: field.default for field in fields(config)}
    for name, choices in owners.items():
        value = getattr(config, name)
        require(
            value == defaults[name] or chosen in choices,
            f"{section}.{name} is {value}, but {section}.{chooser} {chosen} has no such option: "
            f"set it to {defaults[name]}, or {chooser} to {' or '.join(choices)}",
        )
