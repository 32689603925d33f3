"""Read a YAML recipe and overrides into frozen dataclasses, or say everything that is wrong with them.

    arguments, overrides = split_overrides(sys.argv[1:])      # --optimizer.lr 1e-4 --distributed.strategy=ddp
    recipe = read_recipe(Recipe, "recipes/tiny.yaml", overrides)
    print(dump(recipe))                                       # reads back to an equal recipe

The way of a recipe, one module a step: `source` (bytes to text) -> `compose` (text to a tree of `nodes` that know their
line and column) -> `merge` (overrides set into the tree) -> `targets` (a `_target_` that is left is refused) ->
`structure` (tree to dataclasses, led by `schema`). `plain` goes the other way.

A recipe is data. Nothing here imports a module, resolves a YAML tag or calls anything but the schema's dataclasses.
"""

from ac_recipes.reader.mistakes import COMMAND_LINE, Mistake, RecipeError
from ac_recipes.reader.overrides import Override, split_overrides
from ac_recipes.reader.plain import dump, to_plain
from ac_recipes.reader.read import Problem, read_recipe
from ac_recipes.reader.schema import fields_of, homes_of
from ac_recipes.reader.synonyms import synonym_of

__all__ = [
    "COMMAND_LINE",
    "Mistake",
    "Override",
    "Problem",
    "RecipeError",
    "dump",
    "fields_of",
    "homes_of",
    "read_recipe",
    "split_overrides",
    "synonym_of",
    "to_plain",
]
