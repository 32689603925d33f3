"""The batch of a language model, from its shape alone."""

import inspect
from typing import Any

import torch
from torch import nn

from ac_core.discovery.blocks import Block
from ac_core.discovery.parts import LANGUAGE
from ac_core.errors import ActivationCheckpointingError


def text_batch(model: nn.Module, blocks: list[Block], batch_size: int, sequence_length: int) -> dict[str, Any]:
    """`input_ids` and, if the model takes them, `labels`: int64 of `[batch_size, sequence_length]`, without padding.

    Raises:
        ActivationCheckpointingError: the model does not read text, or not text alone.
    """
    takes = list(inspect.signature(model.forward).parameters)
    name = type(model).__name__
    if "input_ids" not in takes:
        raise ActivationCheckpointingError(
            f"batch: {name} takes {', '.join(takes)} and no input_ids, so its batch is not known from batch_size and "
            "sequence_length; give one: a mapping of keyword arguments, a tuple or a tensor, real or on the meta device"
        )
    others = sorted({block.part for block in blocks if block.part != LANGUAGE})
    if others:
        raise ActivationCheckpointingError(
            f"batch: {name} also has the parts {', '.join(others)}, and how much they are given is not known from "
            "batch_size and sequence_length; give a batch with it"
        )
    ids = torch.arange(sequence_length).remainder(_vocabulary(model)).repeat(batch_size, 1)
    return {"input_ids": ids} | ({"labels": ids.clone()} if "labels" in takes else {})


def _vocabulary(model: nn.Module) -> int:
    sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return max(sizes, default=2)
