"""How a global batch is shared among ranks and microbatches, and the order that sequences are seen in."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ac_recipes.errors import UsageError
from ac_recipes.recipe import StepSchedulerConfig


@dataclass(frozen=True)
class BatchPlan:
    """One optimizer step: every rank runs `accumulation` forwards of `local` sequences."""

    world_size: int
    local: int
    accumulation: int

    @classmethod
    def of(cls, schedule: StepSchedulerConfig, world_size: int) -> "BatchPlan":
        """Share `global_batch_size` evenly. A `local_batch_size` above a rank's share becomes the share.

        Raises:
            UsageError: it cannot be shared evenly.
        """
        share, left = divmod(schedule.global_batch_size, world_size)
        if left:
            raise UsageError(
                f"step_scheduler.global_batch_size: {schedule.global_batch_size} sequences cannot be shared evenly by "
                f"{world_size} ranks; use a multiple of {world_size}"
            )
        local = min(schedule.local_batch_size, share)
        if share % local:
            raise UsageError(
                f"step_scheduler.local_batch_size: {local} does not divide the {share} sequences of each "
                f"of {world_size} ranks"
            )
        return cls(world_size, local, share // local)


def limited(schedule: StepSchedulerConfig, sequences: int) -> StepSchedulerConfig:
    """`schedule` with its `num_epochs` as steps: whole global batches out of so many passes over `sequences`."""
    if schedule.num_epochs is None:
        return schedule
    steps = max(1, schedule.num_epochs * sequences // schedule.global_batch_size)
    return replace(schedule, max_steps=min(schedule.max_steps, steps))


def check_filled(schedule: StepSchedulerConfig, sequences: int) -> None:
    """Refuse a global batch that `sequences` cannot fill: a step would see some of them more than once.

    Raises:
        UsageError: naming the most that a global batch can be.
    """
    if schedule.global_batch_size > sequences:
        raise UsageError(
            f"step_scheduler.global_batch_size: {schedule.global_batch_size} sequences are more than the {sequences} "
            "that there are to train on; take no more than that, or give more data"
        )


class GlobalOrder:
    """Which sequences each optimizer step sees: a new permutation every epoch, one global batch after the other.

    It is a function of the seed and the step alone: the same on any number of ranks, and a resumed run goes on where
    the killed one was without having stored anything.
    """

    def __init__(self, sequences: int, global_batch_size: int, seed: int) -> None:
        self._sequences = sequences
        self._batch = global_batch_size
        self._seed = seed
        self._epoch: tuple[int, Tensor] | None = None

    def batch(self, step: int) -> Tensor:
        """Sequence indices of optimizer step `step` (from 0), int64 `[global_batch_size]`."""
        places = range(step * self._batch, (step + 1) * self._batch)
        return torch.stack([self._permutation(place // self._sequences)[place % self._sequences] for place in places])

    def _permutation(self, epoch: int) -> Tensor:
        if self._epoch is None or self._epoch[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch = (epoch, torch.randperm(self._sequences, generator=generator))
        return self._epoch[1]
