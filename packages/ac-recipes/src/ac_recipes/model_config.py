"""The model section against transformers' own configuration classes."""

import dataclasses
import re
from collections.abc import Iterator
from copy import deepcopy
from difflib import get_close_matches
from typing import Any

from ac_recipes.config_source import Part, architectures, source_of
from ac_recipes.errors import UsageError
from ac_recipes.images.layout import image_problems
from ac_recipes.model_fields import check_length
from ac_recipes.reader import Problem
from ac_recipes.reader.mistakes import KeyPath
from ac_recipes.recipe import Recipe
from ac_recipes.their_words import said


def check_model_config(recipe: Recipe) -> Iterator[Problem]:
    """What transformers has against `model.config` that its source does not show: a bad value, a field that it lacks.

    transformers takes an unknown field silently, as an attribute nobody reads; here it is a mistake. Imports
    transformers, so run it only on a recipe that is right in itself, and on fields that `field_problems` has nothing
    against.
    """
    from transformers import CONFIG_MAPPING

    fields = recipe.model.config
    if fields is None:  # a pretrained model brings its own, which is seen when it is loaded
        return
    try:
        config = transformers_config(fields)
    except Exception as error:  # noqa: BLE001 - whatever its validators raise is about these fields
        yield _refused(error, CONFIG_MAPPING[fields["model_type"]], fields, ("model", "config"))
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


def _field_problems(config: Any, fields: dict[str, Any], path: KeyPath) -> Iterator[Problem]:
    """Fields that `config` does not have; the same in the configurations inside of it."""
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
        if inner is not None and isinstance(given := fields.get(name), dict):
            part = _parts(config).get(name)
            its = {field: value for field, value in given.items() if part is None or field not in part.settings}
            yield from _field_problems(inner, its, (*path, name))


def _parts(config: Any) -> dict[str, Part]:
    return source_of(config.model_type).parts if config.model_type in architectures() else {}


def _refused(error: Exception, kind: Any, fields: dict[str, Any], path: KeyPath) -> Problem:
    """What a validator of transformers says, at the field it says it of, without the names of Python classes.

    kind: the class that `error` was raised in the construction of; or in that of a part, which shows when it is alone.
    """
    for name, part in kind.sub_configs.items():
        if isinstance(given := fields.get(name), dict) and (inner := _class_of_part(kind, name, part, given)):
            try:
                inner(**deepcopy(given))
            except Exception as its:  # noqa: BLE001 - as above
                return _refused(its, inner, given, (*path, name))
    text = " ".join(str(error).split())
    field = re.match(r"Validation error for field '(\w+)': \w+: (.*)", text)
    if field:
        told = re.sub(r"^Field '\w+' ", "", field[2])
        whole = re.fullmatch(r"expected float, got int \(value: (-?\d+)\)", told)
        remedy = f"; write it with a point: {whole[1]}.0" if whole else ""
        return Problem(path=(*path, field[1]), message=told + remedy)
    if text.startswith("Class validation error"):
        told = re.sub(r"^Class validation error for validator '\w+': \w+: ", "", text)[:400]
    else:
        told = f"transformers cannot take these fields together: {said(error)}; mend the field that it names, if any"
    return Problem(path=path, message=told)


def _class_of_part(whole: Any, name: str, part: Any, given: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if part is not AutoConfig:
        return part
    default = _parts(whole).get(name)
    model_type = given.get("model_type") or (default.model_type if default is not None else None)
    return None if model_type is None else CONFIG_MAPPING[model_type]


def _taken_silently(config: Any, given: dict[str, Any], known: set[str]) -> list[str]:
    # An older spelling such as rope_theta is translated and leaves no attribute; a misspelt name stays as one.
    return [name for name in given if name != "model_type" and name not in known and name in vars(config)]
