"""Building the model that a recipe describes."""

from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ac_recipes.errors import UsageError
from ac_recipes.pretrained import load_model
from ac_recipes.recipe import ModelConfig


def build_model(config: ModelConfig, vocab_size: int, seed: int, device: torch.device) -> PreTrainedModel:
    """A causal language model with new or pretrained weights, in training mode on `device`.

    New weights are drawn on the CPU from `seed`: the same on every rank and on every kind of device.

    Raises:
        UsageError: transformers has no such architecture, or refuses the configuration; or the pretrained model cannot
            be had, or is not what the recipe says it is.
    """
    if config.pretrained_model_name_or_path is not None:
        return _pretrained(config, config.pretrained_model_name_or_path, vocab_size).to(device).train()
    fields = dict(config.config)
    if fields.setdefault("vocab_size", vocab_size) < vocab_size:
        raise UsageError(
            f"model.config.vocab_size: {fields['vocab_size']} is below the tokenizer's {vocab_size} entries; leave it "
            "out, and it becomes the tokenizer's"
        )
    transformers.logging.set_verbosity_error()
    try:
        hf_config = AutoConfig.for_model(**fields)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(
                hf_config, dtype=getattr(torch, config.dtype), attn_implementation=config.attn_implementation
            )
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"model.config: transformers cannot build this model: {reason[:400]}") from error
    return model.to(device).train()


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
    expected, default = AutoConfig.for_model(**fields).to_dict(), AutoConfig.for_model(model_type).to_dict()
    for field, value in expected.items():
        other = getattr(found, field, None)
        if (field in fields or value != default.get(field)) and value != other:
            raise UsageError(f"model.config: the recipe says {field} = {value!r}, but in {name} it is {other!r}")
