"""From what the user named to a recipe that is known to be right."""

from collections.abc import Sequence

from ac_recipes.model_config import check_model_config
from ac_recipes.parallel.fit import check_fit
from ac_recipes.reader import Override, read_recipe
from ac_recipes.recipe import TARGETS, Recipe
from ac_recipes.shipped import find_recipe
from ac_recipes.text_files import check_text_files


def load_recipe(name_or_path: str, overrides: Sequence[Override] = ()) -> Recipe:
    """Read a recipe file or a shipped recipe, with overrides; nothing is built.

    Raises:
        UsageError: there is no such recipe.
        RecipeError: every mistake in it, with file, line and column.
    """
    checks = [check_text_files, check_model_config, check_fit]
    return read_recipe(Recipe, find_recipe(name_or_path), overrides, targets=TARGETS, checks=checks)
