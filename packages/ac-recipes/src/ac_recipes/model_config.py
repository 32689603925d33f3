"""The model section against transformers' own configuration classes."""

import dataclasses
import re
from collections.abc import Iterator
from copy import deepcopy
from difflib import get_close_matches
from typing import Any

from ac_recipes.model_fields import SET_ELSEWHERE, check_length
from ac_recipes.reader import Problem
from ac_recipes.recipe import Recipe


def check_model_config(recipe: Recipe) -> Iterator[Problem]:
    """What transformers has against `model.config`: an unknown architecture, a bad value, a field it does not have.

    transformers takes an unknown field silently, as an attribute nobody reads; here it is a mistake. Imports
    transformers, so run it only on a recipe that is right in itself.
    """
    from transformers import CONFIG_MAPPING

    fields = recipe.model.config
    model_type = fields["model_type"]
    if model_type not in CONFIG_MAPPING:
        near = get_close_matches(model_type, list(CONFIG_MAPPING), n=1)
        yield Problem(
            path=("model", "config", "model_type"),
            message=f"transformers has no architecture {model_type!r}",
            suggestion=near[0] if near else None,
        )
        return
    for name in sorted(SET_ELSEWHERE.keys() & fields.keys()):
        yield Problem(path=("model", "config", name), message=f"set {SET_ELSEWHERE[name]} instead", at_key=True)
    kind = CONFIG_MAPPING[model_type]
    for name, other in getattr(kind, "attribute_map", {}).items():
        if name in fields and other in fields:
            message = f"{name!r} is another name of {other!r}, which is given too; give one"
            yield Problem(path=("model", "config", name), message=message, at_key=True)
    try:
        # A copy: transformers completes nested mappings such as rope_scaling in place.
        config = kind(**{k: deepcopy(v) for k, v in fields.items() if k != "model_type"})
    except Exception as error:  # noqa: BLE001 - whatever its validators raise is about these fields
        yield _refused(error)
        return
    known = {field.name for field in dataclasses.fields(config)} | set(config.attribute_map)
    for name in _taken_silently(config, fields, known):
        near = get_close_matches(name, sorted(known), n=1)
        yield Problem(
            path=("model", "config", name),
            message=f"unknown field of {type(config).__name__}",
            suggestion=near[0] if near else None,
            at_key=True,
        )
    most = getattr(config, "max_position_embeddings", None)
    if isinstance(most, int):
        yield from check_length(recipe, most)


def _refused(error: Exception) -> Problem:
    """What a validator of transformers says, at the field it says it of, without the names of Python classes."""
    text = " ".join(str(error).split())
    field = re.match(r"Validation error for field '(\w+)': \w+: (.*)", text)
    if field:
        said = re.sub(r"^Field '\w+' ", "", field[2])
        return Problem(path=("model", "config", field[1]), message=said)
    said = re.sub(r"^Class validation error for validator '\w+': \w+: ", "", text)
    return Problem(path=("model", "config"), message=said)


def _taken_silently(config: Any, given: dict[str, Any], known: set[str]) -> list[str]:
    # An older spelling such as rope_theta is translated and leaves no attribute; a misspelt name stays as one.
    return [name for name in given if name != "model_type" and name not in known and name in vars(config)]
