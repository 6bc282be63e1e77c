"""`Run`: all sections and the checks between them; and dataclasses from JSON and TOML."""

from __future__ import annotations

import dataclasses
import datetime
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from aiscale.errors import ConfigError, hint, require
from aiscale.plan.config.layout import CompressionConfig, ParallelConfig
from aiscale.plan.config.sections import (
    HFModelConfig,
    LoopConfig,
    ModelConfig,
    OptimizerConfig,
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that decides what a training run computes."""

    name: str = "run"  #: results go to runs/NAME
    model: ModelConfig | HFModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)

    def __post_init__(self) -> None:
        require(
            bool(self.name) and "/" not in self.name and not self.name.startswith("."),
            f"name is {self.name!r}: it names a folder below runs/, so it must not be empty, hold "
            "/ or start with .",
        )
        require(
            self.loop.seq_len <= self.model.max_seq_len,
            f"a sequence of {self.loop.seq_len} tokens is longer than the "
            f"{self.model.max_seq_len} that the model reads: shorten it, or take another model",
        )
        require(
            self.compression.is_default or self.parallel.strategy == "ddp",
            f"compression.method {self.compression.method} (wire {self.compression.wire}) with "
            f"parallel.strategy {self.parallel.strategy}: it is a communication hook of DDP: set "
            "parallel.strategy=ddp",
        )
        require(
            self.compression.method != "radius" or not self.parallel.distributed_optimizer,
            "compression.method radius needs all moments on every rank: set "
            "parallel.distributed_optimizer=false",
        )
        require(
            self.compression.method == "none" or self.loop.precision != "fp16",
            "compression with fp16 would keep gradients of another loss scale: take bf16",
        )
        self.parallel.check_model(self.model)

    def check_world(self, world_size: int) -> int:
        """The number of data-parallel ranks among `world_size`.

        Raises ConfigError if the run does not fit.
        """
        dp = self.parallel.data_parallel(world_size)
        n_micro, _ = self.loop.micro_batches(dp)
        self.parallel.check_micro_batches(n_micro)
        return dp


def build(cls: type, tree: object, prefix: str = ""):
    """A dataclass from a table of JSON or TOML.

    Raises ConfigError that names an unknown, missing or wrong key.
    """
    whole = prefix.rstrip(".") or f"the {cls.__name__.lower()}"
    require(
        isinstance(tree, dict), f"{whole} is {tree!r}: it must be a table of settings ({{...}})"
    )
    hints = typing.get_type_hints(cls)
    fields = {each.name: each for each in dataclasses.fields(cls)}
    for key in tree:
        require(key in fields, f"unknown key {prefix}{key}: {hint(key, fields, prefix=prefix)}")
    for key, each in fields.items():
        needed = each.default is each.default_factory is dataclasses.MISSING
        require(key in tree or not needed, f"key {prefix}{key} is missing")
    return cls(**{key: as_type(hints[key], value, prefix + key) for key, value in tree.items()})


def as_type(kind: type, value: object, path: str):
    """`value` (from the command line, JSON or TOML) as the field's type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if type(None) in inner:
        return None if value is None else as_type(inner[0], value, path)
    if kind == ModelConfig | HFModelConfig:  # Hugging Face's has a model_type or a folder
        theirs = isinstance(value, dict) and {"model_type", "folder"} & set(value)
        kind = HFModelConfig if theirs else ModelConfig
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or kind is datetime.date):
        return value if isinstance(value, kind) else build(kind, value, f"{path}.")
    if origin is tuple:
        require(isinstance(value, list | tuple), f"{path} is {value!r}: it must be a list")
        return tuple(as_type(inner[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is Mapping:
        require(isinstance(value, dict), f"{path} is {value!r}: it must be a table")
        of_key, of_item = inner
        table = {
            as_type(of_key, key, path): as_type(of_item, item, f"{path}.{key}")
            for key, item in value.items()
        }
        return types.MappingProxyType(table)
    if origin is Literal:
        require(value in inner, f"{path} is {value!r}: it must be one of {', '.join(inner)}")
        return value
    if kind is bool:
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        require(str(value).lower() in words, f"{path} is {value!r}: it must be true or false")
        return words[str(value).lower()]
    try:
        if kind is int and not isinstance(value, int):
            number = float(value)
            require(number == int(number), f"{path} is {value!r}: it must be a whole number")
            return int(number)
        return kind(value)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        names = {int: "a whole number", float: "a number", str: "text"}
        raise ConfigError(f"{path} is {value!r}: it must be {names[kind]}") from None
