"""Checkpointing for the time of a context."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ac_core import (
    ActivationCheckpointingConfig,
    Report,
    apply_activation_checkpointing,
    remove_activation_checkpointing,
)


@contextmanager
def applied(model: nn.Module, config: ActivationCheckpointingConfig) -> Iterator[Report]:
    """Checkpoint the blocks of `model` inside of the context."""
    report = apply_activation_checkpointing(model, config)
    try:
        yield report
    finally:
        remove_activation_checkpointing(model)
