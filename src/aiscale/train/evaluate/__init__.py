"""Downstream evaluation of a trained model by EleutherAI's lm-eval harness; see command for the call."""

from aiscale.train.evaluate.command import evaluate

__all__ = ["evaluate"]
