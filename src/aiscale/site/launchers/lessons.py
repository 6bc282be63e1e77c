"""What each launcher starts, and the ranks and GPU memory it needs, for any site: lessons.toml.

The site's profile turns `ranks` and `gpu_memory_gb` into nodes and a constraint. The layout may
depend on the number of GPUs per node, since tensor parallelism should stay within a node.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aiscale.plan.config.run import build
from aiscale.plan.presets import presets

Settings = tuple[tuple[str, str], ...]  #: (options of the trainer, the reason, which may be empty)
#: Published settings of a preset that are options of its trainer, by the lines of a file.
PUBLISHED = (
    ("optimizer", "lr", "min_lr", "decay_steps", "beta2", "weight_decay"),
    ("density", "interval", "dense_until"),
)


@dataclass(frozen=True, kw_only=True)
class Lesson:
    name: str  #: of the file
    title: str
    about: str  #: at the head of the file
    work: str = "train"  #: the template of the job's commands
    call: str = ""  #: how to start it, if not by `aiscale submit` alone
    script: str = ""  #: of a launcher that needs nothing of the kit: the default of SCRIPT
    trainer: str = ""  #: of aiscale.train
    model: str = ""  #: a preset
    steps: int = 0  #: as the file stands, a tenth of them warm-up; 0: all that are published
    perplexity: float = 0  #: of the held-out text after all steps, published
    corpus: str = ""  #: the default of CORPUS; empty: Python's help texts
    settings: Settings = ()
    #: by GPUs per node; the next lower number is used
    layouts: Mapping[int, Settings] = field(default_factory=dict)
    variants: Mapping[str, str] = field(default_factory=dict)  #: to compare: what it is -> options
    exports: tuple[str, ...] = ()  #: NAME=value  # the reason: variables of the ranks
    batch: int = 0  #: sequences a step; 0: as published
    ranks: int = 0  #: 0: one node, or `nodes`
    nodes: int = 0  #: 0: as many as `ranks` need
    shared: str = ""  #: the QOS in which these ranks get a part of a node
    #: as many ranks on CPUs instead, on a part of a node, where the site has such parts
    on_cpus: int = 0
    gpu_memory_gb: float = 0  #: the least that a GPU must have
    hours: float = 0.5
    signal_s: int = 300  #: this long before the time limit, to save a checkpoint
    only: str = ""  #: the site that it is for, if not all

    def layout(self, gpus: int) -> Settings:
        """The options on a node with so many GPUs, and why."""
        fitting = [count for count in self.layouts if count <= gpus]
        return self.settings + (self.layouts[max(fitting)] if fitting else ())

    @property
    def training(self) -> dict:
        """What was published of the model's training."""
        return presets()[self.model]["training"]

    def published(self, gpus: int) -> list[str]:
        """Those published settings that the lesson does not replace, as lines of options."""
        own = " ".join(options for options, _ in self.layout(gpus)).split()
        lines = []
        for names in PUBLISHED:
            words = []
            for name in names:
                option = "--" + name.replace("_", "-")
                if name in self.training and option not in own:
                    words += [option, _short(self.training[name])]
            lines.append(" ".join(words))
        return [line for line in lines if line]


def _short(value: object) -> str:
    """2e-4 rather than 0.0002."""
    if isinstance(value, float) and value < 0.005:
        digits, _, power = f"{value:e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return str(value)


_TABLE = tomllib.loads(Path(__file__).with_name("lessons.toml").read_text(encoding="utf-8"))
LESSONS = {name: build(Lesson, {"name": name, **lesson}) for name, lesson in _TABLE.items()}
