"""What to train, on what data, how, and over how many ranks: one `Run`, written down before anything starts.

A `Run` is a tree of frozen dataclasses. It knows nothing of torch, so that `cost` and `plan` can reason about a
175-billion-parameter run on a laptop, and it is saved word for word in `runs/NAME/run.json`.

    run = recipe("laptop")                                  # a preset is a function that returns a Run
    run = run.override("model.n_layer=4", "optimizer.lr=3e-4")
    fit(run)                                                # train.fit; the same Run under torchrun, srun or mpiexec

World size is not checked here: a `Run` may be written on a laptop for 1024 GPUs. `ParallelConfig.check_world` is
called when processes connect.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import typing
from dataclasses import dataclass, field
from typing import Literal

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp64"]


class ConfigError(ValueError):
    """A configuration that cannot be trained; the message is one line that says what to change."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_positive(section: str, config: object, names: str) -> None:
    for name in names.split():
        value = getattr(config, name)
        _require(value is None or value > 0, f"{section}.{name} is {value}: it must be greater than 0")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only transformer. The defaults for 0 follow GPT-2."""

    n_layer: int = 4  #: L, transformer blocks
    n_head: int = 4  #: H, attention heads
    n_kv_head: int = 0  #: heads that own a key and a value (grouped-query attention); 0: as many as n_head
    d_model: int = 128  #: D, width of the residual stream
    d_ff: int = 0  #: width of the hidden layer of the MLP; 0: 4 x d_model
    vocab_size: int = 256  #: V, rows of the embedding; at least the tokenizer's
    max_seq_len: int = 128  #: longest sequence the position embedding knows, in tokens
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    position: Literal["learned", "rotary"] = "learned"
    activation: Literal["gelu_tanh", "gelu", "relu", "swiglu"] = "gelu_tanh"
    parallel_residual: bool = False  #: attention and MLP read the same input, as in GPT-J and GPT-NeoX
    tied: bool = True  #: the output head is the token embedding, as in GPT-2
    bias: bool = True  #: biases in linear layers and norms
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0  #: base of the rotary frequencies
    activation_checkpointing: bool = False  #: recompute each block in the backward pass instead of keeping it

    def __post_init__(self) -> None:
        _require_positive("model", self, "n_layer n_head d_model vocab_size max_seq_len norm_eps rope_theta")
        for name in ("n_kv_head", "d_ff"):
            value = getattr(self, name)
            _require(value >= 0, f"model.{name} is {value}: it must not be negative (0 takes the default)")
        _require(
            self.d_model % self.n_head == 0,
            f"model.d_model {self.d_model} is not divisible by model.n_head {self.n_head}: "
            "every head needs the same width",
        )
        _require(
            self.n_head % self.kv_heads == 0,
            f"model.n_head {self.n_head} is not divisible by model.n_kv_head {self.kv_heads}: "
            "every key/value head serves the same number of query heads",
        )
        _require(
            self.position != "rotary" or self.d_head % 2 == 0,
            f"model.d_model / model.n_head = {self.d_head} is odd: rotary positions turn pairs of channels",
        )

    @property
    def d_head(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_head

    @property
    def kv_heads(self) -> int:
        """Heads that own a key and a value: n_kv_head, or n_head where that is 0."""
        return self.n_kv_head or self.n_head

    @property
    def ff_width(self) -> int:
        """Width of the hidden layer of the MLP: d_ff, or 4 d_model where that is 0."""
        return self.d_ff or 4 * self.d_model


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text, cut into which tokens."""

    corpus: str = "embedded"  #: embedded (CPython's own documentation), toy (small and repetitive), or a path
    tokenizer: Literal["byte", "char", "word", "bpe"] = "byte"
    bpe_vocab_size: int = 1024  #: size of the vocabulary that tokenizer bpe learns
    val_fraction: float = 0.1  #: the end of the corpus that is held out
    seed: int = 1337  #: of the order in which the training windows are visited

    def __post_init__(self) -> None:
        _require_positive("data", self, "bpe_vocab_size")
        _require(0 < self.val_fraction < 1, f"data.val_fraction is {self.val_fraction}: it must lie between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-3  #: peak learning rate
    min_lr: float = 0.0  #: learning rate at the last step
    warmup_steps: int = 0  #: steps of linear warm-up from 0 to lr
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  #: on matrices and embeddings; never on biases and norms
    momentum: float = 0.9  #: of sgd
    clip_norm: float = 1.0  #: largest global gradient norm; 0: no clipping

    def __post_init__(self) -> None:
        _require_positive("optimizer", self, "lr eps")
        for name in ("min_lr", "warmup_steps", "weight_decay", "clip_norm", "momentum"):
            value = getattr(self, name)
            _require(value >= 0, f"optimizer.{name} is {value}: it must not be negative")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"optimizer.{name} is {value}: it must lie in [0, 1)")
        _require(self.min_lr <= self.lr, f"optimizer.min_lr {self.min_lr} is above optimizer.lr {self.lr}: lower it")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the work is divided. dp x tp x pp must be the number of ranks that connect."""

    strategy: Literal["serial", "mpi", "ddp"] = "serial"
    dp: int = 0  #: data-parallel ranks; 0: as many as connect
    tp: int = 1  #: tensor-parallel ranks
    pp: int = 1  #: pipeline stages
    bucket_mb: float = 25.0  #: ddp: gradients travel in buckets of this many MiB
    static_graph: bool = False  #: ddp: the graph never changes, so unused parameters need not be looked for
    gradient_as_bucket_view: bool = True  #: ddp: gradients live inside the buckets, one copy less
    compress: Literal["none", "bf16"] = "none"  #: ddp: the precision in which gradients travel

    def __post_init__(self) -> None:
        _require_positive("parallel", self, "tp pp bucket_mb")
        _require(self.dp >= 0, f"parallel.dp is {self.dp}: it must not be negative (0 takes every rank)")
        if self.strategy in ("serial", "mpi", "ddp"):
            _require(
                self.tp == self.pp == 1,
                f"parallel.strategy {self.strategy} keeps the whole model on every rank, "
                f"but tp {self.tp} x pp {self.pp} would cut it: set both to 1",
            )

    def data_parallel(self, world_size: int) -> int:
        """The number of data-parallel ranks in a world of `world_size`; raises ConfigError if it does not fit."""
        cut = self.tp * self.pp
        if self.strategy == "serial" and world_size != 1:
            raise ConfigError(
                f"parallel.strategy serial uses 1 rank, but this job has {world_size}: start 1, or use ddp"
            )
        if self.dp == 0 and world_size % cut:
            raise ConfigError(
                f"tp {self.tp} x pp {self.pp} = {cut} does not divide the {world_size} ranks of this job: "
                f"start a multiple of {cut}"
            )
        dp = self.dp or world_size // cut
        if dp * cut != world_size:
            raise ConfigError(
                f"dp {dp} x tp {self.tp} x pp {self.pp} = {dp * cut} ranks, but this job has {world_size}: "
                f"change one of them, or start {dp * cut}"
            )
        return dp


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The training loop."""

    steps: int = 300  #: optimizer steps; ignored when epochs is set
    epochs: float = 0.0  #: passes over the training windows; 0: count steps instead
    seq_len: int = 128  #: T, tokens in one sequence
    global_batch: int = 16  #: sequences in one optimizer step, over all ranks
    micro_batch: int = 0  #: sequences in one forward pass of one rank; 0: all of the rank's share at once
    precision: Precision = "fp32"
    eval_every: int = 100  #: steps between evaluations; 0: only at the end
    eval_batches: int = 8  #: global batches in one evaluation
    log_every: int = 1  #: steps between lines of metrics.jsonl
    checkpoint_every: int = 0  #: steps between checkpoints; 0: only at the end
    keep_checkpoints: int = 2  #: how many of the newest checkpoints stay on disk
    seed: int = 1337  #: of the initial weights
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def __post_init__(self) -> None:
        _require_positive("loop", self, "seq_len global_batch eval_batches log_every keep_checkpoints")
        for name in ("steps", "epochs", "micro_batch", "eval_every", "checkpoint_every"):
            value = getattr(self, name)
            _require(value >= 0, f"loop.{name} is {value}: it must not be negative")
        _require(bool(self.steps or self.epochs), "loop.steps and loop.epochs are both 0: set one of them")

    def micro_batches(self, dp: int) -> tuple[int, int]:
        """(number of micro-batches, sequences in each) for one of `dp` data-parallel ranks."""
        _require(
            self.global_batch % dp == 0,
            f"loop.global_batch {self.global_batch} is not divisible by the {dp} data-parallel ranks: "
            f"set loop.global_batch={-(-self.global_batch // dp) * dp}",
        )
        share = self.global_batch // dp
        size = self.micro_batch or share
        _require(
            share % size == 0,
            f"loop.global_batch {self.global_batch} / dp {dp} = {share} sequences a rank, "
            f"not a multiple of loop.micro_batch {size}: change one of them",
        )
        return share // size, size


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that decides what a training run computes."""

    name: str = "run"  #: results go to runs/NAME
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)

    def __post_init__(self) -> None:
        _require(
            bool(self.name) and "/" not in self.name and not self.name.startswith("."),
            f"name is {self.name!r}: it names a folder below runs/, so it must not be empty, hold / or start with .",
        )
        _require(
            self.loop.seq_len <= self.model.max_seq_len,
            f"loop.seq_len {self.loop.seq_len} is longer than model.max_seq_len {self.model.max_seq_len}: "
            "shorten the first or lengthen the second",
        )

    def override(self, *assignments: str) -> Run:
        """A copy with `section.key=value` applied, in order; values are read as the field's type."""
        tree = self.to_dict()
        for assignment in assignments:
            path, equals, text = assignment.partition("=")
            _require(bool(equals), f"--set {assignment!r} has no '=': write it as section.key=value")
            _assign(tree, path.strip(), text.strip())
        return Run.from_dict(tree)

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(tree: dict) -> Run:
        """The inverse of to_dict; raises ConfigError on a key that does not exist."""
        return _build(Run, tree, "")

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


def _unknown(path: str, known: list[str]) -> ConfigError:
    close = difflib.get_close_matches(path.rpartition(".")[2], [k.rpartition(".")[2] for k in known], n=1)
    hint = next((f"did you mean {k}?" for k in known if close and k.rpartition(".")[2] == close[0]), "")
    return ConfigError(f"unknown key {path}: {hint or 'it may be one of ' + ', '.join(known)}")


def _build(cls: type, tree: dict, prefix: str):
    hints = typing.get_type_hints(cls)
    for key in tree:
        if key not in hints:
            raise _unknown(prefix + key, [prefix + name for name in hints])
    values = {}
    for key, value in tree.items():
        kind = hints[key]
        nested = dataclasses.is_dataclass(kind)
        values[key] = _build(kind, value, f"{prefix}{key}.") if nested else _convert(kind, value, prefix + key)
    return cls(**values)


def _convert(kind: type, value: object, path: str):
    """`value` (a string from the command line, or what JSON held) as the field's type."""
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        _require(value in choices, f"{path} is {value!r}: it must be one of {', '.join(choices)}")
        return value
    if kind is bool:
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        _require(str(value).lower() in words, f"{path} is {value!r}: it must be true or false")
        return words[str(value).lower()]
    try:
        if kind is int and not isinstance(value, int):
            number = float(value)
            _require(number == int(number), f"{path} is {value!r}: it must be a whole number")
            return int(number)
        return kind(value)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        names = {int: "a whole number", float: "a number", str: "text"}
        raise ConfigError(f"{path} is {value!r}: it must be {names[kind]}") from None


def _assign(tree: dict, path: str, text: str) -> None:
    """Set tree[a][b] = text for path a.b, refusing keys that are not there."""
    section, dot, key = path.partition(".")
    if not dot:
        if path in tree and not isinstance(tree[path], dict):
            tree[path] = text
            return
        owners = [f"{s}.{path}" for s, keys in tree.items() if isinstance(keys, dict) and path in keys]
        raise ConfigError(
            f"unknown key {path}: did you mean {owners[0]}?" if owners else f"unknown key {path}: write section.key"
        )
    if not isinstance(tree.get(section), dict):
        raise _unknown(section, [s for s, keys in tree.items() if isinstance(keys, dict)])
    if key not in tree[section]:
        raise _unknown(path, [f"{section}.{k}" for k in tree[section]])
    tree[section][key] = text
