"""A recipe with a plan in it, written so that it reads back as meant: into the recipe's own text, comments kept."""

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from ac_core import ActivationCheckpointingConfig, Plan
from ac_recipes.analysis.planning import planned_recipe
from ac_recipes.analysis.yaml_text import set_in_text
from ac_recipes.automodel import Translator
from ac_recipes.errors import RunError
from ac_recipes.reader import Override, RecipeError, dump, read_recipe, to_plain
from ac_recipes.recipe import Recipe
from ac_recipes.shipped import find_recipe

_PLACE = ("distributed", "activation_checkpointing")


def write_planned(
    name: str, overrides: Sequence[Override], recipe: Recipe, plan: Plan, path: Path, *, overwrite: bool = False
) -> bool:
    """Write the recipe `name` with `overrides` and the plan to `path`.

    Args:
        name, overrides: from which `recipe` was read.
        overwrite: replace a file that is there already.

    Returns:
        Whether the text of the recipe was kept. Where it cannot be changed in place, every setting is written anew.

    Raises:
        RunError: the file cannot be written, or has appeared while the plan was made.
    """
    planned = planned_recipe(recipe, plan)
    text = _in_place(find_recipe(name), overrides, planned)
    kept = text is not None
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")  # of nobody else
    try:
        if not overwrite:
            path.open("x").close()  # a claim that nobody else can make
        partial.write_text(dump(planned) if text is None else text, encoding="utf-8")
        os.replace(partial, path)
    except FileExistsError as error:
        raise RunError(
            f"--write: {path} has appeared while the plan was made, and is left as it is; give another name, or "
            "--overwrite"
        ) from error
    except OSError as error:
        partial.unlink(missing_ok=True)
        if not overwrite:
            path.unlink(missing_ok=True)
        raise RunError(f"--write: cannot write {path}: {error.strerror or error}") from error
    return kept


def _in_place(source: Path, overrides: Sequence[Override], planned: Recipe) -> str | None:
    """The text of `source` with everything set in it; None if what it then says is something else."""
    config = planned.distributed.checkpointing
    try:
        text = source.read_text(encoding="utf-8")
        for override in overrides:
            text = set_in_text(text, override.parts, override.text)
        text = set_in_text(text, _PLACE, _without_defaults(config))
        read = read_recipe(Recipe, str(source), text=text, rewrite=Translator())
    except (ValueError, yaml.YAMLError, RecipeError):
        return None
    return text if read == planned else None


def _without_defaults(config: ActivationCheckpointingConfig) -> dict[str, Any]:
    default = {field.name: field.default for field in fields(config)}
    return {name: value for name, value in to_plain(config).items() if value != default[name]}
