"""Evaluates a trained model on downstream tasks with EleutherAI's lm-eval harness: see command.py."""

from aiscale.train.evaluate.command import evaluate
