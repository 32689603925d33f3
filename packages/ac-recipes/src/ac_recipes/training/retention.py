"""Which checkpoints stay on disk."""

import math
import shutil
from collections.abc import Sequence

from ac_recipes.training.config import CheckpointConfig
from ac_recipes.training.manifest import Checkpoint


def best(checkpoints: Sequence[Checkpoint], count: int = 1) -> list[Checkpoint]:
    """The `count` checkpoints of the lowest validation loss, the best first; of two equal ones the newer. One whose
    loss is not finite is not among them."""
    measured = [c for c in checkpoints if c.validation_loss is not None and math.isfinite(c.validation_loss)]
    return sorted(measured, key=lambda checkpoint: (checkpoint.validation_loss, -checkpoint.step))[:count]


def superseded(checkpoints: Sequence[Checkpoint], config: CheckpointConfig) -> list[Checkpoint]:
    """Those that are neither among the `keep_last` newest nor among the `keep_best` best. Oldest first."""
    if config.keep_last is None:
        return []
    ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
    kept = {checkpoint.step for checkpoint in [*ordered[-config.keep_last :], *best(ordered, config.keep_best)]}
    return [checkpoint for checkpoint in ordered if checkpoint.step not in kept]


def remove(checkpoint: Checkpoint) -> None:
    """Delete it. It loses its name first: a kill in between leaves nothing that looks like a damaged checkpoint. One
    that was moved away, and linked to, is left to who did so."""
    if checkpoint.path.is_symlink():
        return
    leaving = checkpoint.path.rename(checkpoint.path.with_name(f"{checkpoint.path.name}.partial"))
    shutil.rmtree(leaving)
