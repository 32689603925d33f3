"""Checkpointing, and compilation, for the time of a context."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ac_core import (
    ActivationCheckpointingConfig,
    Report,
    apply_activation_checkpointing,
    find_blocks,
    remove_activation_checkpointing,
)


@contextmanager
def applied(model: nn.Module, config: ActivationCheckpointingConfig, *, compiled: bool = False) -> Iterator[Report]:
    """Checkpoint the blocks of `model` inside of the context, and compile them one by one."""
    report = apply_activation_checkpointing(model, config)
    blocks = [block.module for block in find_blocks(model)] if compiled else []
    if compiled:
        torch.compiler.reset()  # what other policies have left would count towards the limit of recompilations
    for block in blocks:
        block.compile()
    try:
        yield report
    finally:
        for block in blocks:
            block._compiled_call_impl = None  # `compile` has no public way back
        remove_activation_checkpointing(model)
