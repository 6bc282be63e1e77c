"""Lesson 14's GPT, with every choice that the survey names.

positions.py tells a model where tokens stand.
"""

from aiscale.lesson.model.gpt import ACTIVATIONS, GPT
from aiscale.lesson.model.positions import place
