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
from ac_recipes.parallel.compiling import compile_blocks
from ac_recipes.parallel.config import CompileConfig


@contextmanager
def applied(
    model: nn.Module, config: ActivationCheckpointingConfig, *, compiling: CompileConfig | None = None
) -> Iterator[Report]:
    """Checkpoint the blocks of `model` inside of the context, and compile them one by one if `compiling` says how."""
    report = apply_activation_checkpointing(model, config)
    try:
        if compiling is not None:
            torch.compiler.reset()  # what other policies have left would count towards the limit of recompilations
            compile_blocks(model, compiling)
        yield report
    finally:
        if compiling is not None:
            for block in find_blocks(model):
                block.module._compiled_call_impl = None  # `compile` has no public way back
        remove_activation_checkpointing(model)
