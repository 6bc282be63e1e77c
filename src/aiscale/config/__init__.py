"""The configuration of a training run, `Run`: model, data, optimizer, parallel layout and loop.

A `Run` is a tree of frozen dataclasses. It does not import torch, so `cost` and `plan` can handle a run of 175 billion
parameters on a laptop. It is saved in `runs/NAME/run.json`.

    run = recipe("laptop")                                  # a preset is a function that returns a Run
    run = run.override("model.n_layer=4", "optimizer.lr=3e-4")
    fit(run)                                                # train.fit; the same Run under torchrun, srun or mpiexec

World size is not checked here, since a laptop may write a `Run` for 1024 GPUs, but in `Run.check_world`, when processes
connect.
"""

from aiscale.config.errors import ConfigError, hint, remedy, require_writable, write_whole
from aiscale.config.layout import CompressionConfig, ParallelConfig
from aiscale.config.run import Run
from aiscale.config.sections import DataConfig, HFModelConfig, LoopConfig, ModelConfig, OptimizerConfig, Precision
