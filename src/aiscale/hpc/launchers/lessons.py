"""What each launcher starts, and the ranks and GPU memory it needs, for any site: the table lessons.toml.

The site's profile turns `ranks` and `gpu_memory_gb` into nodes and a constraint. The layout may depend on the number of
GPUs per node, since tensor parallelism should stay within a node.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aiscale.config.run import build

Settings = tuple[tuple[str, str], ...]  #: (key=value, or several, the reason)


@dataclass(frozen=True, kw_only=True)
class Lesson:
    name: str  #: of the file
    title: str
    about: str  #: at the head of the file
    work: str = "train"  #: the template of the job's commands
    call: str = ""  #: how to start it, if not by `aiscale submit` alone
    script: str = ""  #: of a launcher that needs nothing of the kit: the default of SCRIPT
    recipe: str = ""
    steps: int = 0  #: of a submission as the file stands, a tenth of them warm-up; 0: all that the recipe has
    perplexity: float = 0  #: of the held-out text after all of the recipe's steps, published
    corpus: str = "stdlib"  #: the default of CORPUS; embedded is too short for windows of 2,048 tokens
    settings: Settings = ()
    layouts: Mapping[int, Settings] = field(default_factory=dict)  #: by GPUs per node; the next lower number is used
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  #: to compare: what it is -> key=value to add
    exports: tuple[str, ...] = ()  #: NAME=value  # the reason: variables of the ranks
    ranks: int = 0  #: 0: one node
    shared: str = ""  #: the QOS in which these ranks get a part of a node
    on_cpus: int = 0  #: as many ranks on CPUs instead, on a part of a node, where the site has such parts
    gpu_memory_gb: float = 0  #: the least that a GPU must have
    hours: float = 0.5
    signal_s: int = 300  #: this long before the time limit, to save a checkpoint
    only: str = ""  #: the site that it is for, if not all

    def layout(self, gpus: int) -> Settings:
        fitting = [count for count in self.layouts if count <= gpus]
        return self.settings + (self.layouts[max(fitting)] if fitting else ())


_TABLE = tomllib.loads(Path(__file__).with_name("lessons.toml").read_text(encoding="utf-8"))
LESSONS = {name: build(Lesson, {"name": name, **lesson}) for name, lesson in _TABLE.items()}
