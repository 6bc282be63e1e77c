"""Recipes: complete runs with a name; see registry for how to use and to add one."""

from aiscale.recipes import registry, gpt2, radius, frontier  # noqa: I001  (importing enters them, in this order)
from aiscale.recipes.registry import RECIPES, recipe
