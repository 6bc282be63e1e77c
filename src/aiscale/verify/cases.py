"""The cases of `aiscale verify`: each is one way to train a small model, and names the serial run that it must equal.

The settings make mistakes visible. AdamW divides a gradient by its own size, so with the usual epsilon of 1e-8 a
gradient that is twice too large trains the same weights. An epsilon of 1e-5, a learning rate that changes, and a
clipping norm above the gradient's norm in some steps and below it in others make such weights differ.
FSDP has cases in fp64 and fp32, because torch divides in fp64 itself and leaves it to the collective in fp32.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

STEPS = 20
#: The Python of every job, as words of a command line.
PYTHON: tuple[str, ...] = (sys.executable,)

#: A model that trains in seconds, with a vocabulary that 2 does not divide and a batch that 1, 2, 3 and 4 divide.
_BASE = {
    "model.n_layer": 4,
    "model.n_head": 4,
    "model.d_model": 32,
    "model.vocab_size": 259,
    "model.max_seq_len": 32,
    "model.position": "learned",
    "loop.seq_len": 32,
    "loop.global_batch": 12,
    "loop.steps": STEPS,
    "loop.eval_every": STEPS // 2,
    "loop.eval_batches": 1,
    "loop.device": "cpu",
    "data.corpus": str(resources.files("aiscale.published") / "papers/radius_downstream.csv"),  # the same everywhere
    "loop.seed": 1,  # with some a row is nearly constant for a moment, and layer norm makes much of a rounding
    "data.seed": 1,
    "optimizer.lr": 1e-2,
    "optimizer.warmup_steps": 5,
    "optimizer.eps": 1e-5,
    "optimizer.weight_decay": 0.3,
    "optimizer.clip_norm": 1.2,
}

#: GPT-2's architecture; the same twice as deep, for four stages of two pieces; Llama's.
MODELS: dict[str, dict] = {
    "gpt2": {},
    "deep": {"model.n_layer": 8},
    "llama": {
        "model.norm": "rmsnorm",
        "model.position": "rotary",
        "model.activation": "swiglu",
        "model.n_kv_head": 2,
        "model.tied": "false",
        "model.bias": "false",
    },
}

#: Choices in pairs: norm, position, activation, optimizer, and what makes them differ from the others in more. A fault
#: in one shows in its cases, whatever it is paired with.
_PAIRS = {
    "alibi": ("rmsnorm", "alibi", "geglu", "lamb", {"model.n_kv_head": 2}),
    "deepnorm": ("deepnorm", "sinusoidal", "relu", "muon", {}),
    "t5": ("layernorm", "t5", "reglu", "lars", {"model.relative_buckets": 8, "optimizer.trust": 1.0}),
    "shaw": ("rmsnorm", "shaw", "silu", "adafactor", {"model.bias": "false"}),  # a key's bias has no gradient but noise
    "huang": ("deepnorm", "huang", "swiglu", "adam", {"model.n_kv_head": 2}),
}
for _name, (_norm, _position, _activation, _optimizer, _more) in _PAIRS.items():
    MODELS[_name] = {
        "model.norm": _norm,
        "model.position": _position,
        "model.activation": _activation,
        "model.relative_distance": 8,
        "optimizer.name": _optimizer,
        **_more,
    }


@dataclass(frozen=True)
class Case:
    """One way to train one of MODELS."""

    name: str
    strategy: str = "serial"
    ranks: int = 1
    options: str = ""  #: keys of parallel, "tp=2 pp=2", and full keys, "loop.micro_batch=3"
    model: str = "gpt2"  #: one of MODELS
    precision: str = "fp64"
    launcher: str = ""  #: torchrun or mpiexec; empty: aiscale's own
    simulated: bool = False  #: no job: one process simulates the ranks
    compared_with: str = ""  #: the reference case; empty: the serial one

    @property
    def reference(self) -> str:
        """The case that this one must equal."""
        return self.compared_with or f"serial-{self.model}-{self.precision}"

    def settings(self) -> list[str]:
        """KEY=VALUE for --set."""
        words = [word if "." in word.partition("=")[0] else f"parallel.{word}" for word in self.options.split()]
        fixed = {**_BASE, **MODELS[self.model], "loop.precision": self.precision, "name": self.name}
        return [*(f"{key}={value}" for key, value in fixed.items()), f"parallel.strategy={self.strategy}", *words]

    def arguments(self, runs_dir: Path) -> list[str]:
        """The words after `aiscale` on the command line of this case's job."""
        own = [] if self.launcher or self.ranks == 1 else ["--nproc", str(self.ranks)]
        pairs = [word for setting in self.settings() for word in ("--set", setting)]
        return ["train", "--recipe", "laptop", "--runs-dir", str(runs_dir), "--quiet", *own, *pairs]

    def command(self, runs_dir: Path) -> list[str]:
        start = [*PYTHON]
        if self.launcher == "torchrun":
            start += ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
            start += ["--nproc-per-node", str(self.ranks)]
        elif self.launcher == "mpiexec":
            start = [find_mpiexec(), "-n", str(self.ranks), *start]
        return [*start, "-m", "aiscale", *self.arguments(runs_dir)]


def find_mpiexec() -> str:
    """The mpiexec beside this Python (the mpich wheel's), else the one on PATH (a site's module)."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else "mpiexec"


def _serial(model: str, precision: str) -> Case:
    return Case(name=f"serial-{model}-{precision}", model=model, precision=precision)


_INTERLEAVED = "pp=4 schedule=interleaved virtual_stages=2 loop.micro_batch=3"
_ALL = (
    *(_serial(model, precision) for model in MODELS for precision in ("fp64", "fp32")[: 1 + (model not in _PAIRS)]),
    Case("serial-accumulated", options="loop.micro_batch=3"),
    Case("serial-accumulated-fp32", options="loop.micro_batch=3", precision="fp32"),
    Case("ddp-x2", "ddp", 2),
    Case("ddp-x2-accumulated", "ddp", 2, "loop.micro_batch=3"),
    Case("ddp-x3-torchrun", "ddp", 3, launcher="torchrun"),
    Case("ddp-x3-mpiexec", "ddp", 3, launcher="mpiexec"),
    Case("ddp-x4", "ddp", 4, "bucket_mb=0.05"),
    Case("ddp-x2-fp32", "ddp", 2, precision="fp32"),
    *(
        Case(f"{name}-x{ranks}", "ddp", ranks, options)
        for name, ranks, options in (
            ("radius-density-1", 2, "bucket_mb=0.05 compression.method=radius compression.density=1"),
            ("radius-interval-1", 3, "compression.method=radius compression.interval=1"),
            ("radius-warm-up", 2, f"loop.micro_batch=3 compression.method=radius compression.warmup_steps={STEPS}"),
            ("top-k-density-1", 2, "compression.method=top-k compression.density=1"),
        )
    ),
    *(
        Case(name + "-simulated" * simulated, "ddp", 3, options, simulated=simulated, compared_with=f"{name}-simulated")
        for name, options in (
            ("radius-sparse-x3", "compression.method=radius compression.density=0.3 compression.interval=6"),
            ("top-k-sparse-x3", "compression.method=top-k compression.density=0.1"),
        )
        for simulated in (True, False)
    ),
    Case("ddp-x2-llama", "ddp", 2, model="llama"),
    *(Case(f"zero{stage}-x2", "zero", 2, f"zero_stage={stage}", precision="fp32") for stage in range(4)),
    Case("zero2-x4-accumulated", "zero", 4, "zero_stage=2 loop.micro_batch=1", precision="fp32"),
    Case("zero3-x3-llama", "zero", 3, "zero_stage=3", model="llama", precision="fp32"),
    Case("fsdp-x2", "fsdp", 2),
    Case("fsdp-x2-fp32", "fsdp", 2, precision="fp32"),
    Case("fsdp-x2-accumulated", "fsdp", 2, "loop.micro_batch=3"),
    Case("fsdp-x3-kept", "fsdp", 3, "reshard_after_forward=false"),
    Case("fsdp-x3-llama", "fsdp", 3, model="llama"),
    Case("fsdp-hybrid-x4", "fsdp", 4, "replicas=2"),
    Case("tp2", "megatron", 2, "tp=2"),
    Case("tp2-sequence-parallel", "megatron", 2, "tp=2 sequence_parallel=true"),
    Case("tp2-llama", "megatron", 2, "tp=2", model="llama"),
    Case("pp2-gpipe", "pipeline", 2, "pp=2 schedule=gpipe loop.micro_batch=3"),
    Case("pp2-1f1b", "pipeline", 2, "pp=2 loop.micro_batch=3"),
    Case("pp2-dp2-1f1b", "pipeline", 4, "pp=2 loop.micro_batch=2"),
    Case("pp2-1f1b-llama", "pipeline", 2, "pp=2 loop.micro_batch=3", model="llama"),
    Case("pp4-interleaved", "pipeline", 4, _INTERLEAVED, model="deep"),
    Case("pp4-zero-bubble", "pipeline", 4, "pp=4 schedule=zero-bubble loop.micro_batch=3"),
    Case("pp2-megatron", "megatron", 2, "pp=2 loop.micro_batch=3"),
    Case("pp4-interleaved-megatron", "megatron", 4, _INTERLEAVED, model="deep"),
    Case("tp2-pp2-dp2", "megatron", 8, "tp=2 pp=2 loop.micro_batch=2"),
    Case(
        "tp2-pp2-dp2-zero1", "megatron", 8, "tp=2 pp=2 loop.micro_batch=2 distributed_optimizer=true", precision="fp32"
    ),
    Case(
        "tp2-pp2-sequence-parallel-llama",
        "megatron",
        4,
        "tp=2 pp=2 loop.micro_batch=4 sequence_parallel=true",
        model="llama",
    ),
    Case("ddp-x2-alibi", "ddp", 2, model="alibi"),
    Case("ddp-x2-deepnorm", "ddp", 2, model="deepnorm"),
    Case("ddp-x2-zero1-t5", "ddp", 2, "distributed_optimizer=true", model="t5"),
    Case("ddp-x2-zero1-shaw", "ddp", 2, "distributed_optimizer=true", model="shaw"),
    Case("fsdp-x2-alibi", "fsdp", 2, model="alibi"),
    Case("fsdp-x3-deepnorm", "fsdp", 3, model="deepnorm"),
    Case("fsdp-x2-t5", "fsdp", 2, model="t5"),
    Case("fsdp-x2-huang", "fsdp", 2, model="huang"),
    Case("pp2-1f1b-alibi", "pipeline", 2, "pp=2 loop.micro_batch=3", model="alibi"),
    Case("pp2-1f1b-shaw", "pipeline", 2, "pp=2 loop.micro_batch=3", model="shaw"),
    Case("pp2-1f1b-huang", "pipeline", 2, "pp=2 loop.micro_batch=3", model="huang"),
)
CASES: dict[str, Case] = {case.name: case for case in _ALL}
