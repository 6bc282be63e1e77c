"""How a configuration refuses values: in one line that says what to change."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration that cannot be trained; the message is one line that says what to change."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def require_positive(section: str, config: object, names: str) -> None:
    for name in names.split():
        value = getattr(config, name)
        require(value is None or value > 0, f"{section}.{name} is {value}: it must be greater than 0")
