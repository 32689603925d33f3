"""A recipe against what the source of its model's configuration class says. Imports neither transformers nor torch.

`check` knows no more of the model than that. Training asks the configuration itself (`model_config`, `parallel.fit`).
"""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from ac_core import ActivationCheckpointingConfig
from ac_recipes.config_source import ConfigSource, architectures, source_of, source_of_part
from ac_recipes.images.config import DigitsDatasetConfig
from ac_recipes.images.layout import FAMILIES, digits_problems, layout_problems, no_images_for
from ac_recipes.parallel.fit import SHARED_OUT, size_problems
from ac_recipes.reader import Problem
from ac_recipes.recipe import Recipe

_SENSES = re.compile(r"image|vision|pixel|audio|speech|video")
"""In the fields of a model that has more parts than a language model."""


def source_problems(recipe: Recipe) -> Iterator[Problem]:
    """What of the recipe the model that it describes cannot do."""
    fields = recipe.model.config
    if fields is None or fields["model_type"] not in architectures():
        return
    source = source_of(fields["model_type"])
    yield from _images(recipe, source, fields)
    yield from checkpointing_problems(recipe)
    part, given = _language(source, fields)
    if part is not None:
        values = SimpleNamespace(**_values(part, given))
        yield from size_problems(recipe, values, part.kind, _shared(part, given))


def _images(recipe: Recipe, source: ConfigSource, fields: dict[str, Any]) -> Iterator[Problem]:
    model_type = fields["model_type"]
    if not isinstance(recipe.dataset, DigitsDatasetConfig):
        if model_type in FAMILIES and recipe.peft is None and recipe.freeze_config is None:
            yield no_images_for(model_type, recipe.dataset.kind)
        return
    yield from digits_problems(recipe, model_type)
    if model_type not in FAMILIES or (vision := source.parts.get("vision_config")) is None or vision.kind is None:
        return
    if (part := source_of_part(source, vision.kind)) is None:
        return
    values = _values(part, fields.get("vision_config") or {})
    scale = _values(source, fields).get("scale_factor")
    sizes = (values.get("image_size"), values.get("patch_size"), scale)
    if all(isinstance(size, int) for size in sizes):
        yield from layout_problems(recipe, *sizes)


def checkpointing_problems(recipe: Recipe) -> Iterator[Problem]:
    """A scope of checkpointing that names no part of the model, and a router to be kept where there are no experts."""
    fields, asked = recipe.model.config, recipe.distributed.checkpointing
    if fields is None or fields["model_type"] not in architectures():
        return
    source = source_of(fields["model_type"])
    yield from _scope(recipe, source)
    part, _ = _language(source, fields)
    if part is None or source.parts or not asked.strict or "router" not in (asked.save or ()):
        return
    if not any("expert" in name or "moe" in name for name in (*part.fields, *part.aliases)):
        named = part.kind.removesuffix("Config")
        yield Problem(
            path=("distributed", "activation_checkpointing", "save"),
            message=f"'router' matches no call of {named}, which has no experts; leave it out",
        )


def _scope(recipe: Recipe, source: ConfigSource) -> Iterator[Problem]:
    asked = recipe.distributed.checkpointing
    parts = (asked.scope,) if isinstance(asked.scope, str) else asked.scope
    if source.parts or asked.policy == "none" or not asked.strict or {"all", "language"} & set(parts):
        return
    if any(_SENSES.search(name) for name in source.fields):
        return
    inside = isinstance(recipe.distributed.activation_checkpointing, ActivationCheckpointingConfig)
    where = ("activation_checkpointing", "scope") if inside else ("activation_checkpointing_scope",)
    yield Problem(
        path=("distributed", *where),
        message=f"{', '.join(map(repr, parts))}: {source.kind.removesuffix('Config')} is a language model and has no "
        "such part; use 'all' or 'language'",
    )


def _language(source: ConfigSource, fields: dict[str, Any]) -> tuple[ConfigSource | None, dict[str, Any]]:
    """The configuration of the language model, which may be a part of the whole; None where it cannot be told."""
    if (part := source.parts.get("text_config")) is None:
        return source, fields
    given = fields.get("text_config") or {}
    if part.kind is not None:
        return source_of_part(source, part.kind), given
    model_type = given.get("model_type", part.model_type)
    return (source_of(model_type) if model_type in architectures() else None), given


def _values(source: ConfigSource, given: dict[str, Any]) -> dict[str, Any]:
    values = {source.aliases.get(name, name): value for name, value in [*source.numbers.items(), *given.items()]}
    return values | {alias: values[name] for alias, name in source.aliases.items() if name in values}


def _shared(source: ConfigSource, given: dict[str, Any]) -> set[str]:
    """The sizes whose ranks have something to share out."""
    names = {*source.fields, *source.aliases, *given}
    return {size for size, fields in SHARED_OUT.items() if names & set(fields)}
