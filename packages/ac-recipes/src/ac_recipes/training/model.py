"""Building the model that a recipe describes."""

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ac_recipes.errors import UsageError
from ac_recipes.recipe import ModelConfig


def build_model(config: ModelConfig, vocab_size: int, seed: int, device: torch.device) -> PreTrainedModel:
    """A causal language model with new weights, in training mode on `device`.

    The weights are drawn on the CPU from `seed`: the same on every rank and on every kind of device.

    Raises:
        UsageError: transformers has no such architecture, or refuses the configuration.
    """
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
    # A model of fake tensors is on the CPU, and cannot be moved, not even to where it is.
    return model.train() if device.type == "cpu" else model.to(device).train()
