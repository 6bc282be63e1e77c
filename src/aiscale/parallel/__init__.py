"""One file or folder per strategy; `build(run, world)` gives an engine, `engine.step(micro_batches, lr)` a result."""

from aiscale.parallel.build import build, preload
from aiscale.parallel.serial import Engine, StepResult
