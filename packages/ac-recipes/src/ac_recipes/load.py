"""From what the user named to a recipe that is known to be right."""

from collections.abc import Sequence

from ac_recipes.data.checks import check_data
from ac_recipes.model_config import check_model_config
from ac_recipes.reader import Override, read_recipe
from ac_recipes.recipe import TARGETS, Recipe
from ac_recipes.shipped import find_recipe


def load_recipe(name_or_path: str, overrides: Sequence[Override] = ()) -> Recipe:
    """Read a recipe file or a shipped recipe, with overrides; nothing is built.

    Raises:
        UsageError: there is no such recipe.
        RecipeError: every mistake in it, with file, line and column.
    """
    checks = [check_data, check_model_config]
    return read_recipe(Recipe, find_recipe(name_or_path), overrides, targets=TARGETS, checks=checks)
