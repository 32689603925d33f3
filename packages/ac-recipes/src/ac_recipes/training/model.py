"""Building the model that a recipe describes."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ac_recipes.data.packing import check_packing
from ac_recipes.data.prepare import Prepared
from ac_recipes.errors import UsageError
from ac_recipes.lora import add_lora
from ac_recipes.model_class import auto_class
from ac_recipes.model_config import check_positions, transformers_config, with_vocabulary
from ac_recipes.pretrained import load_model
from ac_recipes.recipe import ModelConfig, Recipe
from ac_recipes.their_words import said
from ac_recipes.training.console import Row
from ac_recipes.training.freeze import freeze
from ac_recipes.training.untrained import check_towers


def trainable_model(recipe: Recipe, data: Prepared, device: torch.device) -> tuple[PreTrainedModel, list[Row]]:
    """The model of a recipe for its data, with the parts frozen and the adapters added that the recipe says, and what
    to show of it.

    Raises:
        UsageError: the model cannot be built, or does not fit the recipe.
    """
    model = build_model(recipe.model, len(data.tokenizer), recipe.rng.seed, device, data.model_fields)
    check_positions(recipe, model.config)
    if recipe.packed_sequence.packed_sequence_size:
        check_packing(model)
    frozen = freeze(model, recipe.freeze_config)
    if recipe.peft is not None:
        add_lora(model, recipe.peft, recipe.rng.seed)
    check_towers(model, recipe)
    return model, frozen


def build_model(
    config: ModelConfig, vocab_size: int, seed: int, device: torch.device, fields: Mapping[str, int] | None = None
) -> PreTrainedModel:
    """A language model or vision-language model with new or pretrained weights, in training mode on `device`.

    New weights are drawn on the CPU from `seed`: the same on every rank and on every kind of device. `fields` are what
    the data adds to the configuration.

    Raises:
        UsageError: transformers has no such architecture, or refuses the configuration; or the pretrained model cannot
            be had, or is not what the recipe says it is.
    """
    if config.pretrained_model_name_or_path is not None:
        return _pretrained(config, config.pretrained_model_name_or_path, vocab_size).to(device).train()
    transformers.logging.set_verbosity_error()
    fields = with_vocabulary(config.config, vocab_size) | dict(fields or {})
    try:
        hf_config = transformers_config(fields)
        auto = auto_class(hf_config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = auto.from_config(
                hf_config, dtype=getattr(torch, config.dtype), attn_implementation=config.attn_implementation
            )
    except Exception as error:
        raise UsageError(
            f"model.config: transformers cannot build the {fields['model_type']!r} that these fields describe: "
            f"{said(error)}; mend the field, or leave it out for transformers' default"
        ) from error
    # A model of fake tensors is on the CPU, and cannot be moved, not even to where it is.
    return model.train() if device.type == "cpu" else model.to(device).train()


def _pretrained(config: ModelConfig, name: str, vocab_size: int) -> PreTrainedModel:
    model = load_model(name, dtype=getattr(torch, config.dtype), attn_implementation=config.attn_implementation)
    entries = model.get_input_embeddings().num_embeddings
    if entries < vocab_size:
        raise UsageError(
            f"tokenizer: it has {vocab_size} entries, but {name} has embeddings for {entries}; use the model's own"
        )
    if config.config is not None:
        _check_expected(config.config, model.config, name)
    return model


def _check_expected(fields: dict[str, Any], found: PreTrainedConfig, name: str) -> None:
    """Refuse a model that is not what the recipe says it is, in whatever spelling transformers takes for it."""
    model_type = fields["model_type"]
    if found.model_type != model_type:
        raise UsageError(f"model.config.model_type: the recipe says {model_type!r}, but {name} is {found.model_type!r}")
    expected, default = transformers_config(fields).to_dict(), AutoConfig.for_model(model_type).to_dict()
    for field, value in expected.items():
        other = getattr(found, field, None)
        if (field in fields or value != default.get(field)) and not _is_same(value, other):
            raise UsageError(f"model.config: the recipe says {field} = {value!r}, but in {name} it is {other!r}")


def _is_same(expected: Any, found: Any) -> bool:
    """Whether two values of a field are one. A GGUF file has its floats in 32 bits: 1e-5 comes back as 9.9999997e-6."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return expected.keys() == found.keys() and all(_is_same(expected[key], found[key]) for key in expected)
    if isinstance(expected, float) and isinstance(found, (int, float)):
        return math.isclose(expected, found, rel_tol=2**-23)
    return bool(expected == found)
