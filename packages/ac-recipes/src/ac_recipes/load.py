"""From what the user named to a recipe that is known to be right."""

from collections.abc import Sequence

from ac_recipes.automodel import Translator
from ac_recipes.data.checks import check_data
from ac_recipes.model_config import check_model_config
from ac_recipes.model_fields import check_model_fields
from ac_recipes.parallel.fit import check_fit
from ac_recipes.reader import Override, read_recipe
from ac_recipes.recipe import Recipe
from ac_recipes.shipped import find_recipe


def load_recipe(name_or_path: str, overrides: Sequence[Override] = (), *, quick: bool = False) -> Recipe:
    """Read a recipe file or a shipped recipe, with overrides; nothing is built.

    Args:
        quick: import neither transformers nor torch. The rarer demands of a transformers configuration's validators
            are then not found; whoever builds the model finds them.

    Raises:
        UsageError: there is no such recipe.
        RecipeError: every mistake in it, with file, line and column.
    """
    return load_translated(name_or_path, overrides, quick=quick)[0]


def load_translated(
    name_or_path: str, overrides: Sequence[Override] = (), *, quick: bool = False
) -> tuple[Recipe, Translator]:
    """As `load_recipe`, and how a recipe of NeMo AutoModel was translated."""
    translator = Translator()
    checks = [check_data, *([check_model_fields] if quick else [check_model_config, check_fit])]
    recipe = read_recipe(Recipe, find_recipe(name_or_path), overrides, rewrite=translator, checks=checks)
    return recipe, translator
