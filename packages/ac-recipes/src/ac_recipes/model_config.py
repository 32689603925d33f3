"""The model section against transformers' own configuration classes."""

import dataclasses
import re
from collections.abc import Iterator
from copy import deepcopy
from difflib import get_close_matches
from typing import Any

from ac_recipes.errors import UsageError
from ac_recipes.images.layout import image_problems
from ac_recipes.model_fields import SET_ELSEWHERE, check_length
from ac_recipes.reader import Problem
from ac_recipes.reader.mistakes import KeyPath
from ac_recipes.recipe import Recipe


def check_model_config(recipe: Recipe) -> Iterator[Problem]:
    """What transformers has against `model.config`: an unknown architecture, a bad value, a field it does not have.

    transformers takes an unknown field silently, as an attribute nobody reads; here it is a mistake. Imports
    transformers, so run it only on a recipe that is right in itself.
    """
    from transformers import CONFIG_MAPPING

    fields = recipe.model.config
    if fields is None:  # a pretrained model brings its own, which is seen when it is loaded
        return
    unknown = [*_unknown_architectures(fields, ("model", "config"), list(CONFIG_MAPPING))]
    yield from unknown
    if unknown:
        return
    for name in sorted(SET_ELSEWHERE.keys() & fields.keys()):
        yield Problem(path=("model", "config", name), message=f"set {SET_ELSEWHERE[name]} instead", at_key=True)
    try:
        config = transformers_config(fields)
    except Exception as error:  # noqa: BLE001 - whatever its validators raise is about these fields
        yield _refused(error)
        return
    yield from _field_problems(config, fields, ("model", "config"))
    yield from image_problems(recipe, config)
    yield from _too_long(recipe, config)


def check_positions(recipe: Recipe, config: Any) -> None:
    """Refuse sequences longer than the model, which has transformers' configuration `config`, has positions for.

    Raises:
        UsageError: naming both.
    """
    for problem in _too_long(recipe, config):
        raise UsageError(f"{'.'.join(map(str, problem.path))}: {problem.message}")


def _too_long(recipe: Recipe, config: Any) -> Iterator[Problem]:
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    return check_length(recipe, most) if isinstance(most, int) else iter(())


def transformers_config(fields: dict[str, Any]) -> Any:
    """transformers' configuration object of `model.config`. Raises whatever its validators raise."""
    from transformers import CONFIG_MAPPING

    # A copy: transformers completes nested mappings such as rope_scaling in place.
    return CONFIG_MAPPING[fields["model_type"]](**{k: deepcopy(v) for k, v in fields.items() if k != "model_type"})


def with_vocabulary(fields: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """`model.config` with a vocabulary for `vocab_size` tokens, where the architecture keeps it: in the configuration
    of the language model, if that is a part of the whole.

    Raises:
        UsageError: the recipe gives a smaller one.
    """
    nested = "text_config" in transformers_config({"model_type": fields["model_type"]}).sub_configs
    language = dict(fields.get("text_config") or {}) if nested else dict(fields)
    if language.setdefault("vocab_size", vocab_size) < vocab_size:
        path = "model.config.text_config.vocab_size" if nested else "model.config.vocab_size"
        raise UsageError(
            f"{path}: {language['vocab_size']} is below the tokenizer's {vocab_size} entries; leave it out, and it "
            "becomes the tokenizer's"
        )
    return fields | {"text_config": language} if nested else language


def _unknown_architectures(fields: dict[str, Any], path: KeyPath, known: list[str]) -> Iterator[Problem]:
    model_type = fields.get("model_type")
    if model_type is not None and model_type not in known:
        near = get_close_matches(str(model_type), known, n=1)
        yield Problem(
            path=(*path, "model_type"),
            message=f"transformers has no architecture {model_type!r}",
            suggestion=near[0] if near else None,
        )
    for name, value in fields.items():
        if isinstance(value, dict) and name.endswith("_config"):
            yield from _unknown_architectures(value, (*path, name), known)


def _field_problems(config: Any, fields: dict[str, Any], path: KeyPath) -> Iterator[Problem]:
    """Fields that `config` does not have, or has by two names; the same in the configurations inside of it."""
    for name, other in config.attribute_map.items():
        if name in fields and other in fields:
            message = f"{name!r} is another name of {other!r}, which is given too; give one"
            yield Problem(path=(*path, name), message=message, at_key=True)
    known = {field.name for field in dataclasses.fields(config)} | set(config.attribute_map)
    for name in _taken_silently(config, fields, known):
        near = get_close_matches(name, sorted(known), n=1)
        yield Problem(
            path=(*path, name),
            message=f"unknown field of {type(config).__name__}",
            suggestion=near[0] if near else None,
            at_key=True,
        )
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None and isinstance(fields.get(name), dict):
            yield from _field_problems(inner, fields[name], (*path, name))


def _refused(error: Exception) -> Problem:
    """What a validator of transformers says, at the field it says it of, without the names of Python classes."""
    text = " ".join(str(error).split())
    field = re.match(r"Validation error for field '(\w+)': \w+: (.*)", text)
    if field:
        said = re.sub(r"^Field '\w+' ", "", field[2])
        return Problem(path=("model", "config", field[1]), message=said)
    said = re.sub(r"^Class validation error for validator '\w+': \w+: ", "", text)
    return Problem(path=("model", "config"), message=said[:400])


def _taken_silently(config: Any, given: dict[str, Any], known: set[str]) -> list[str]:
    # An older spelling such as rope_theta is translated and leaves no attribute; a misspelt name stays as one.
    return [name for name in given if name != "model_type" and name not in known and name in vars(config)]
