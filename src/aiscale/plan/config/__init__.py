"""What is trained, in the words of the formulas, `Run`: model, optimizer, parallel layout and loop.

A tree of frozen dataclasses, saved in `runs/NAME/run.json`. World size is not checked here, since a
laptop may write a `Run` for 1024 GPUs, but in `Run.check_world`, when processes connect.
"""

from aiscale.errors import ConfigError, hint, remedy, require_writable, write_whole
from aiscale.plan.config.layout import CompressionConfig, ParallelConfig
from aiscale.plan.config.run import Run
from aiscale.plan.config.sections import (
    HFModelConfig,
    LoopConfig,
    ModelConfig,
    OptimizerConfig,
    Precision,
)
