"""A variant on a model of its own, ready to run: what is measured of it one time, and the step that is timed."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.utils.checkpoint
from torch import Tensor, nn

from tools.bench.meter import Memory, compare_gradients, gradients, step_memory, train_step
from tools.bench.variants import Variant

_WARM_UP = 2  # policies that learn from a first step which outputs nobody needs have settled after it


class Contestant:
    """`variant` applied to a copy of `model`.

    Raises `Unavailable` where the variant cannot be applied.
    """

    def __init__(self, variant: Variant, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        self.variant = variant
        self.batch = batch
        self.model = copy.deepcopy(model)
        before = set(_ignored_ops())
        self._ignored_ops = before
        try:
            variant.apply(self.model)
            self._ignored_ops = set(_ignored_ops())
        finally:
            _set_ignored_ops(before)

    def step(self) -> Tensor:
        """One training step without an optimizer: the loss."""
        with self._process_state():
            return train_step(self.model, self.batch)

    def warm_up(self) -> list[Tensor]:
        """A few steps; the gradients of the last."""
        for _ in range(_WARM_UP):
            self.step()
        return gradients(self.model)

    def examine(self, expected: list[Tensor]) -> tuple[Memory, str]:
        """Memory of a step, and how its gradients compare with the `expected` ones."""
        got = self.warm_up()
        with self._process_state():
            memory = step_memory(self.model, self.batch)
        return memory, compare_gradients(got, expected)

    @contextmanager
    def _process_state(self) -> Iterator[None]:
        # AutoModel adds operators to torch's process-wide list of those that selective checkpointing does not cache.
        # Every variant sees the list as if it were alone in the process, or one peer's change would speed up another.
        before = set(_ignored_ops())
        _set_ignored_ops(self._ignored_ops)
        try:
            yield
        finally:
            _set_ignored_ops(before)


def _ignored_ops() -> set[object]:
    return torch.utils.checkpoint.SAC_IGNORED_OPS


def _set_ignored_ops(ops: set[object]) -> None:
    _ignored_ops().clear()
    _ignored_ops().update(ops)
