"""Recipes that train with activation checkpointing that can be trusted; see the command line `ac-recipes --help`.

    recipe = ac_recipes.load_recipe("default")
    result = ac_recipes.train(recipe, "default")

Loads without torch; what needs it is loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ac_recipes.auto import AutoModelForCausalLM, AutoModelForImageTextToText
    from ac_recipes.load import load_recipe
    from ac_recipes.parallel.setup import DistributedSetup
    from ac_recipes.recipe import Recipe
    from ac_recipes.training.loop import Result
    from ac_recipes.training.trainer import train

__version__ = "0.1.0"

_HOME = {
    "AutoModelForCausalLM": "ac_recipes.auto",
    "AutoModelForImageTextToText": "ac_recipes.auto",
    "DistributedSetup": "ac_recipes.parallel.setup",
    "Recipe": "ac_recipes.recipe",
    "Result": "ac_recipes.training.loop",
    "load_recipe": "ac_recipes.load",
    "train": "ac_recipes.training.trainer",
}

__all__ = [
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "DistributedSetup",
    "Recipe",
    "Result",
    "load_recipe",
    "train",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'ac_recipes' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(set(__all__) | set(globals()))
