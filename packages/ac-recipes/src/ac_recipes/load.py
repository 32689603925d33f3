"""From what the user named to a recipe that is known to be right."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ac_recipes.automodel import Translator
from ac_recipes.data.checks import check_data
from ac_recipes.errors import UsageError
from ac_recipes.model_config import check_model_config
from ac_recipes.model_fields import check_declared_length, field_problems
from ac_recipes.parallel.fit import check_fit
from ac_recipes.reader import Override, Problem, RecipeError, read_recipe
from ac_recipes.reader.mistakes import MistakeLog
from ac_recipes.reader.nodes import MapNode, place_at
from ac_recipes.reader.structure import Structurer
from ac_recipes.recipe import Recipe
from ac_recipes.shipped import find_recipe
from ac_recipes.source_checks import checkpointing_problems, source_problems


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
    translator, model = Translator(), _ModelFields()

    def rewrite(root: MapNode, log: MistakeLog) -> MapNode:
        model.look_at(tree := translator(root, log))
        return tree

    def check_model(recipe: Recipe) -> Iterator[Problem]:
        if quick or model.log.mistakes:
            yield from check_declared_length(recipe)
            yield from source_problems(recipe) if not model.log.mistakes else ()
        else:
            yield from check_model_config(recipe)
            yield from check_fit(recipe)
            yield from checkpointing_problems(recipe)

    try:
        recipe = read_recipe(
            Recipe, find_recipe(name_or_path), overrides, rewrite=rewrite, checks=[check_data, check_model]
        )
    except RecipeError as error:
        model.log.mistakes += error.mistakes
    if model.log.mistakes:
        model.log.raise_mistakes()
    if model.unavailable is not None:
        raise model.unavailable
    return recipe, translator


@dataclass(frozen=True, kw_only=True)
class _Written:
    config: dict[str, Any] | None = None


class _ModelFields:
    """What stands against the fields of `model.config` as they were written: a mistake elsewhere in the recipe does not
    keep it back, and it is worded alike with transformers and without.

    unavailable: why it cannot be told.
    """

    def __init__(self) -> None:
        self.log = MistakeLog()
        self.unavailable: UsageError | None = None

    def look_at(self, root: MapNode) -> None:
        model = root.entries.get("model")
        entry = model.node.entries.get("config") if model is not None and isinstance(model.node, MapNode) else None
        if entry is None:
            return
        written = Structurer(_Written, MistakeLog()).read_recipe(MapNode(entry.node.place, {"config": entry}))
        if not isinstance(written, _Written) or written.config is None:  # no mapping of values: the reader says so
            return
        try:
            for problem in field_problems(written.config):
                place = place_at(root, problem.path, of_key=problem.at_key, about=problem.message)
                self.log.add(place, problem.path, problem.message, problem.suggestion)
        except UsageError as error:
            self.unavailable = error
