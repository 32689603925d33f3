"""Freezing parts of a model, before anything is built around it."""

from torch import nn

from ac_core.discovery.parts import AUDIO, LANGUAGE, VISION, part_of
from ac_recipes.errors import UsageError
from ac_recipes.freeze_config import FreezeConfig
from ac_recipes.training.console import Row


def freeze(model: nn.Module, config: FreezeConfig | None) -> list[Row]:
    """Turn off the gradients of what `config` names; returns what to show of it.

    Raises:
        UsageError: the model has no such part, or nothing is left to train.
    """
    if config is None:
        return []
    parts = {name: part_of(model, name) for name, _ in model.named_parameters()}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    asked, frozen = [], set()
    for field, what, is_in in (
        ("freeze_embeddings", "embeddings", lambda _, parameter: id(parameter) in embeddings),
        ("freeze_vision_tower", "vision tower", lambda name, _: parts[name] == VISION),
        ("freeze_audio_tower", "audio tower", lambda name, _: parts[name] == AUDIO),
        ("freeze_language_model", "language model", lambda name, _: parts[name] == LANGUAGE),
    ):
        if not getattr(config, field):
            continue
        found = {name for name, parameter in model.named_parameters() if is_in(name, parameter)}
        if not found:
            raise UsageError(f"freeze_config.{field}: {type(model).__name__} has no {what}; set it to false")
        asked.append(what)
        frozen |= found
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    if frozen == sizes.keys():
        raise UsageError(f"freeze_config: {', '.join(asked)} are all that {type(model).__name__} has; nothing is left")
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    what = ", ".join(asked) or "nothing"
    return [("frozen", what, what, f"{sum(sizes[n] for n in frozen):,} of {sum(sizes.values()):,} parameters")]
