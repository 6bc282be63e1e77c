"""Training: `fit(run)`, in a notebook cell, a test, or a job on a thousand ranks."""

from aiscale.train.loop import AlreadyTrained, Result, TrainingError, fit
from aiscale.train.records import RunFolderError, load_run, open_trained, read_metrics
