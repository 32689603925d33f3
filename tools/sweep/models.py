"""Tiny random models of transformers' generation classes, one per class.

A configuration is made tiny through its constructor, so that everything a configuration derives (layer types, head
sizes, rope parameters) is derived from the tiny sizes.
"""

import dataclasses
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

from tools.sweep.sizes import DEPTH, DEPTH_NAMES, EVEN_IF_NONE, HEADS, LISTS, OVERRIDES, SIZES

KINDS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "any-to-any": modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
}


def classes() -> dict[str, str]:
    """Every generation class of the installed transformers and its kind, in alphabetical order."""
    found: dict[str, str] = {}
    for kind, mapping in KINDS.items():
        for names in mapping.values():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, kind)
    return dict(sorted(found.items()))


def tiny_model(class_name: str, dropout: float = 0.0) -> nn.Module:
    """A model of that class in training mode, fp32, with random weights that are the same every time.

    dropout: the probability of every dropout that the class has on by default; the others are off.
    """
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    config = tiny_config(model_class.config_class, dropout)
    model = model_class._from_config(config).float().train()
    for parameter in model.parameters():
        if not parameter.any():  # a gate that starts shut keeps gradients from everything behind it
            nn.init.normal_(parameter, std=0.02)
    return model


def tiny_config(config_class: type[PreTrainedConfig], dropout: float = 0.0) -> PreTrainedConfig:
    """A configuration of that class with the sizes of `sizes.py`; dropout as in `tiny_model`."""
    return _Shrinker(dropout).config(config_class, {}, {})


class _Shrinker:
    def __init__(self, dropout: float) -> None:
        self.dropout = dropout
        self.token_ids: dict[str, int] = {}  # one id per special token, the same in every part of the model

    def config(
        self, config_class: type[PreTrainedConfig], settings: dict[str, Any], overrides: dict[str, Any]
    ) -> PreTrainedConfig:
        """settings: what the configuration around this one always sets in it; overrides: what `sizes.py` does."""
        defaults = {field.name: _default(field) for field in dataclasses.fields(config_class)} | settings
        chosen = dict(settings)
        for name, default in defaults.items():
            if (size := self._size(name, default, defaults)) is not None:
                chosen[name] = size
        part_overrides = OVERRIDES.get(config_class.model_type, {}) | overrides
        chosen |= part_overrides
        for name, (part_class, part_settings, optional) in _parts(config_class).items():
            asked = part_overrides.get(name)
            chosen.pop(name, None)
            if asked is not None or not optional:
                outer = settings.get(name) or {}
                chosen[name] = self.config(part_class, part_settings | outer, asked or {})
        return config_class(**chosen)

    def _size(self, name: str, default: Any, fields: dict[str, Any]) -> Any:
        """What to set the field `name` to; None leaves it to the configuration."""
        latent_attention = "kv_lora_rank" in fields
        if default is None:
            derived = name == "head_dim" and latent_attention
            return SIZES[name] if name in EVEN_IF_NONE and not derived else None
        if name in LISTS:
            return type(default)(LISTS[name])
        if isinstance(default, bool) or not isinstance(default, int | float) or not default:
            return None  # zero means off
        if name == "num_key_value_heads" and latent_attention:
            return HEADS  # it has keys for every head
        if name in DEPTH_NAMES:
            return DEPTH["language" if "vocab_size" in fields else "tower"]
        return SIZES[name] if name in SIZES else self._by_ending(name, default)

    def _by_ending(self, name: str, default: float) -> Any:
        if "drop" in name and default < 1:
            return 0.0 if "layer" in name or "path" in name else self.dropout
        if name.endswith(("_token_id", "_token_index", "_id")):
            return self.token_ids.setdefault(name, 4 + len(self.token_ids))
        return None


def _parts(config_class: type[PreTrainedConfig]) -> dict[str, tuple[type[PreTrainedConfig], dict[str, Any], bool]]:
    """The configurations inside a configuration: class, settings, whether it may be left out."""
    parts = {}
    for name, spec in config_class.sub_configs_defaults.items():
        part_class = CONFIG_MAPPING[spec.model_type] if spec.model_type else spec.config_class
        parts[name] = (part_class, dict(spec.init_kwargs or {}), spec.optional)
    for name, part_class in config_class.sub_configs.items():
        parts.setdefault(name, (part_class, {}, False))
    return parts


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default
