"""One file or folder per strategy; each turns a `Run` and a `World` into an engine.

engine = build(run, world)
result = engine.step(micro_batches, lr)
"""

from aiscale.parallel.build import build, preload
from aiscale.parallel.serial import Engine, StepResult
