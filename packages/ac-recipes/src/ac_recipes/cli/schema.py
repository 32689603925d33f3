"""`ac-recipes schema`: JSON Schema of a recipe, for editors."""

import argparse
import json
from collections.abc import Sequence

from ac_recipes.json_schema import json_schema
from ac_recipes.reader import Override
from ac_recipes.recipe import Recipe

TAKES_A_RECIPE = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This verb has none of its own."""
    parser.epilog = (
        "ac-recipes schema > recipe.schema.json, and as the first line of a recipe: "
        "# yaml-language-server: $schema=recipe.schema.json"
    )


def run(_options: argparse.Namespace, _overrides: Sequence[Override], _arguments: list[str]) -> int:
    """Print it; it is JSON with and without `--json`."""
    print(json.dumps(json_schema(Recipe), indent=2))
    return 0
