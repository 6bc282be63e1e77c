"""What to train, on what data, how, and over how many ranks: one `Run`, written down before anything starts.

A `Run` is a tree of frozen dataclasses. It knows nothing of torch, so that `cost` and `plan` can reason about a
175-billion-parameter run on a laptop, and it is saved word for word in `runs/NAME/run.json`.

    run = recipe("laptop")                                  # a preset is a function that returns a Run
    run = run.override("model.n_layer=4", "optimizer.lr=3e-4")
    fit(run)                                                # train.fit; the same Run under torchrun, srun or mpiexec

World size is not checked here: a `Run` may be written on a laptop for 1024 GPUs. `ParallelConfig.check_world` is
called when processes connect.
"""

from aiscale.config.errors import ConfigError
from aiscale.config.huggingface import HFModelConfig
from aiscale.config.layout import CompressionConfig, ParallelConfig
from aiscale.config.run import Run
from aiscale.config.sections import DataConfig, LoopConfig, ModelConfig, OptimizerConfig, Precision

__all__ = [
    "CompressionConfig",
    "ConfigError",
    "DataConfig",
    "HFModelConfig",
    "LoopConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Precision",
    "Run",
]
