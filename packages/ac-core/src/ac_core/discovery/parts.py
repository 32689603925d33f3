"""Which part of a model a module belongs to: `language`, `vision`, `audio`, or another tower by its own name.

Signals, the strongest first: the nearest ancestor whose `config` object *is* one of the root's named sub-configs; the
innermost telling name on the module path; what the nearest ancestor says that it takes as input
(`main_input_name`, `input_modalities`, both of Hugging Face's `PreTrainedModel`).
"""

import re
from collections.abc import Iterator

from torch import nn

LANGUAGE, VISION, AUDIO = "language", "vision", "audio"

_NAMES = (
    (AUDIO, re.compile(r"audio|speech|whisper|sound|wav|acoustic|codec|mimi", re.IGNORECASE)),
    (VISION, re.compile(r"vision|visual|image|\bvit\b|pixel|video|siglip|clip|dino", re.IGNORECASE)),
    (LANGUAGE, re.compile(r"text|language|llm|thinker|talker", re.IGNORECASE)),
)
_INPUTS = {
    "input_ids": LANGUAGE,
    "input_features": AUDIO,
    "input_values": AUDIO,
    "pixel_values": VISION,
    "pixel_values_videos": VISION,
}
_MODALITIES = {"image": VISION, "video": VISION, "audio": AUDIO, "text": LANGUAGE}


def part_of(model: nn.Module, name: str) -> str:
    """The part of `model` that the module called `name` belongs to; `language` where nothing speaks against it."""
    ancestors = list(_ancestors(model, name))
    towers = dict(_towers(getattr(model, "config", None)))
    for _, module in ancestors:
        tower = towers.get(id(getattr(module, "config", None)))
        if tower is not None:
            return _named(tower) or tower
    for token, _ in ancestors:
        if part := _named(token):
            return part
    for _, module in ancestors:
        if part := _declared_input(module):
            return part
    return LANGUAGE


def _declared_input(module: nn.Module) -> str | None:
    """What a model inside the model says it reads. A decoder inside a speech model says `input_ids`: language."""
    declared = getattr(module, "input_modalities", None) or ()
    kinds = {_MODALITIES.get(m) for m in ([declared] if isinstance(declared, str) else declared)}
    if len(kinds) == 1 and kinds <= {VISION, AUDIO}:
        return str(kinds.pop())
    return _INPUTS.get(getattr(module, "main_input_name", None) or "")


def _named(token: str) -> str | None:
    return next((part for part, pattern in _NAMES if pattern.search(token)), None)


def _ancestors(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """`(last name, module)` from the module's parent up to, and without, the root. The root is the whole model."""
    tokens = name.split(".")[:-1]
    chain = []
    module = model
    for token in tokens:
        module = getattr(module, token)
        chain.append((token, module))
    return reversed(chain)


def _towers(config: object) -> Iterator[tuple[int, str]]:
    """`(id of the config object, tower name)` for every sub-config that a Hugging Face config declares."""
    for name in getattr(type(config), "sub_configs", None) or {}:
        sub = getattr(config, name, None)
        if sub is not None:
            yield id(sub), name.removesuffix("_config")
            yield from _towers(sub)
