"""Building the model that a recipe describes."""

from collections.abc import Mapping

import torch
import transformers
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from ac_recipes.errors import UsageError
from ac_recipes.model_config import with_vocabulary
from ac_recipes.recipe import ModelConfig


def build_model(
    config: ModelConfig, vocab_size: int, seed: int, device: torch.device, fields: Mapping[str, int] | None = None
) -> PreTrainedModel:
    """A language model, or a vision-language model, with new weights, in training mode on `device`.

    The weights are drawn on the CPU from `seed`: the same on every rank and on every kind of device. `fields` are what
    the data adds to the configuration.

    Raises:
        UsageError: transformers has no such architecture, or refuses the configuration.
    """
    transformers.logging.set_verbosity_error()
    fields = with_vocabulary(config.config, vocab_size) | dict(fields or {})
    try:
        hf_config = AutoConfig.for_model(**fields)
        reads_images = type(hf_config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        auto_class = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = auto_class.from_config(
                hf_config, dtype=getattr(torch, config.dtype), attn_implementation=config.attn_implementation
            )
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"model.config: transformers cannot build this model: {reason[:400]}") from error
    return model.to(device).train()
