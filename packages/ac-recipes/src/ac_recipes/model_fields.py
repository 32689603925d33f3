"""The model section against what transformers' configuration classes say in their source (`config_source`).

`check` knows no more than that. `model_config` asks the class itself, where transformers is loaded anyway; it also
finds what only the class's own validators know.
"""

import re
from collections.abc import Iterator, Set
from difflib import get_close_matches
from typing import Any

from ac_recipes.config_source import ConfigSource, architectures, source_of, source_of_part
from ac_recipes.model_sizes import pair_problems, value_problems
from ac_recipes.reader import Problem
from ac_recipes.reader.mistakes import KeyPath, short
from ac_recipes.recipe import Recipe

_SET_ELSEWHERE = {
    "dtype": "model.dtype",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attn_implementation",
    "_attn_implementation": "model.attn_implementation",
}
"""Fields that transformers would take and the model section decides."""

_PLAIN = {"int": int, "float": (float, int), "str": str, "bool": bool, "list": list, "tuple": list, "dict": dict}


def field_problems(fields: dict[str, Any]) -> Iterator[Problem]:
    """What can be told of `model.config`, and of the configurations inside of it, without importing transformers.

    Raises:
        UsageError: transformers is not installed.
    """
    model_type, path = fields.get("model_type"), ("model", "config")
    if not isinstance(model_type, str):  # which the section itself refuses
        return
    if model_type not in architectures():
        yield _no_architecture(model_type, path)
        return
    source = source_of(model_type)
    yield from _problems(fields, source, path)
    yield from pair_problems(source, fields, path, source.numbers)


def check_declared_length(recipe: Recipe) -> Iterator[Problem]:
    """`check_length` for the positions that `model.config` gives."""
    most = _language(recipe.model.config or {})[1].get("max_position_embeddings")
    if isinstance(most, int):
        yield from check_length(recipe, most)


def check_length(recipe: Recipe, most: int) -> Iterator[Problem]:
    """Whether the sequences have more tokens than the model has positions."""
    remedy = "shorten the sequences"
    if recipe.model.pretrained_model_name_or_path is None:
        inside, _ = _language(recipe.model.config or {})
        remedy += f", or raise model.config.{inside}max_position_embeddings"
    for section in ("dataset", "validation_dataset"):
        data = getattr(recipe, section)
        if data is not None and data.sequence_length > most > 0:
            message = f"{data.sequence_length} tokens are more than the {most} positions of the model; {remedy}"
            yield Problem(path=(section, "sequence_length"), message=message)


def _language(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The fields of the language model, after the path inside of `config` at which they stand."""
    nested = config.get("text_config")
    return ("text_config.", nested) if isinstance(nested, dict) else ("", config)


def _problems(
    fields: dict[str, Any], source: ConfigSource, path: KeyPath, also: Set[str] = frozenset()
) -> Iterator[Problem]:
    """also: names that are right although the class does not have them."""
    for name in sorted(_SET_ELSEWHERE.keys() & fields.keys()):
        yield Problem(path=(*path, name), message=f"set {_SET_ELSEWHERE[name]} instead", at_key=True)
    for name, other in source.aliases.items():
        if name != other and name in fields and other in fields:
            message = f"{name!r} is another name of {other!r}, which is given too; give one"
            yield Problem(path=(*path, name), message=message, at_key=True)
    yield from value_problems(source, fields, path)
    right = also | _SET_ELSEWHERE.keys() | {"model_type"}
    for name, value in fields.items():
        annotation = source.fields.get(source.aliases.get(name, name))
        if name in source.parts:
            yield from _part_problems(value, source, name, (*path, name))
        elif annotation is not None and not _may_be(annotation, value):
            yield _expected(annotation, value, (*path, name))
        elif annotation is not None and "drop" in name and not _may_drop(value):
            message = f"{short(value)} is no probability to drop: torch takes 0 or more, and less than 1"
            yield Problem(path=(*path, name), message=message)
        elif annotation is None and name not in right and name not in source.words:
            near = get_close_matches(name, sorted(source.fields.keys() | source.aliases.keys()), n=1)
            yield Problem(
                path=(*path, name),
                message=f"unknown field of {source.kind}",
                suggestion=near[0] if near else None,
                at_key=True,
            )


def _part_problems(given: object, whole: ConfigSource, name: str, path: KeyPath) -> Iterator[Problem]:
    """What is wrong with the configuration `given` as the part `name` of `whole`."""
    if given is None:
        return
    if not isinstance(given, dict):
        yield _expected("a mapping", given, path)
        return
    part, known = whole.parts[name], architectures()
    model_type = given.get("model_type", part.model_type if part.kind is None else None)
    if model_type is not None and not isinstance(model_type, str):
        yield _expected("str", model_type, (*path, "model_type"))
        return
    if part.kind is not None:
        if model_type is not None and part.kind in known.values() and known.get(model_type) != part.kind:
            always = f"{name} of {whole.kind} is always a {part.kind}"
            message = f"{model_type!r} would be ignored, as {always}; leave it out"
            yield Problem(path=(*path, "model_type"), message=message)
        source = source_of_part(whole, part.kind)
    elif model_type is not None and model_type not in known:
        yield _no_architecture(model_type, path)
        return
    else:
        source = None if model_type is None else source_of(model_type)
    if source is not None:
        yield from _problems(given, source, path, part.settings)
        yield from pair_problems(source, given, path)  # the whole may have defaults of its own for its parts


def _no_architecture(model_type: str, path: KeyPath) -> Problem:
    near = get_close_matches(model_type, architectures(), n=1)
    return Problem(
        path=(*path, "model_type"),
        message=f"transformers has no architecture {model_type!r}",
        suggestion=near[0] if near else None,
    )


def _expected(what: str, value: object, path: KeyPath) -> Problem:
    return Problem(path=path, message=f"expected {what}, got {type(value).__name__} (value: {short(value)})")


def _may_drop(value: object) -> bool:
    """Whether `value`, of a field such as `attention_dropout` or `drop_path_rate`, could be right: the probabilities of
    `torch.nn.functional.dropout` and, without 1, of `scaled_dot_product_attention`."""
    if isinstance(value, list):
        return all(map(_may_drop, value))
    return isinstance(value, bool) or not isinstance(value, int | float) or 0 <= value < 1


def _may_be(annotation: str, value: object) -> bool:
    """Whether `value` could be right. What transformers makes of numbers and of its own types is left to it."""
    outer, nested = annotation, True
    while nested:
        outer, nested = re.subn(r"\[[^\[\]]*\]", "", outer)
    members = [member.strip() for member in outer.split("|")]
    if any(member not in _PLAIN and member != "None" for member in members):
        return True
    if value is None:
        return "None" in members
    return any(isinstance(value, _PLAIN[member]) for member in members if member != "None")
