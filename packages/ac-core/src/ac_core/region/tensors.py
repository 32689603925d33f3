"""Tensors that a block writes in place: buffers such as BatchNorm's statistics, and tensors among its attributes.

Without this a BatchNorm in a block would update its running statistics twice a step, and a block that reads a tensor
that it also writes would be recomputed as another function.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ac_core.errors import ActivationCheckpointingError

_SMALL = 65536
"""Elements up to which a vector is always copied: BatchNorm's kernel writes its running statistics without
counting up their version, so no check would notice."""

Path = tuple[Any, ...]
"""Where a tensor was found in a block: the same place has the same path in every forward."""


class HeldTensor:
    """A tensor before a forward."""

    def __init__(self, value: Tensor, path: Path, *, copied: bool) -> None:
        self.value = value
        self.path = path
        self.version = value._version
        self.always = value.dim() <= 1 and value.numel() <= _SMALL
        self.copy = _copy(value) if copied or self.always else None

    @property
    def written(self) -> bool:
        return self.value._version != self.version

    def as_found(self, say: Callable[[Path], str]) -> Tensor:
        """What a recompute finds in its place.

        Another tensor where the forward may have written to it: copying the old values back would count as a change of
        what the graph has saved.

        Raises:
            ActivationCheckpointingError: it was not written to in the forward, and was since.
        """
        if self.copy is not None:
            return _copy(self.copy)
        if self.written:
            raise ActivationCheckpointingError(
                f"{say(self.path)} was modified in place since the forward, so the recompute would give gradients of "
                "another function; run backward before it is modified"
            )
        return self.value


class TensorLearner:
    """Which tensors of a block its forward writes.

    Small vectors are always copied before a forward. Of the others, the first forward copies every one; from then on
    only those that it saw written are, so that a block with large constants (a mask, quantised weights) pays nothing
    for them. One that is written later and not at first is an error.
    """

    def __init__(self) -> None:
        self._written: frozenset[Path] | None = None

    def hold(self, tensors: list[tuple[Path, Tensor]]) -> dict[int, HeldTensor]:
        """The tensors by their `id`: one that is found in two places stays one."""
        held: dict[int, HeldTensor] = {}
        for path, value in tensors:
            if id(value) not in held:
                copied = self._written is None or path in self._written
                held[id(value)] = HeldTensor(value, path, copied=copied)
        return held

    def settle(self, held: dict[int, HeldTensor], say: Callable[[Path], str], *, failed: bool) -> None:
        """After a forward: learns what it wrote, and lets the copies of all other tensors go.

        Raises:
            ActivationCheckpointingError: a tensor was written that was not copied before.
        """
        written = [tensor for tensor in held.values() if tensor.written]
        unknown = next((tensor for tensor in written if tensor.copy is None), None)
        for tensor in held.values():
            if not (tensor.always or tensor.written):
                tensor.copy = None
        if not failed or unknown is not None:
            self._written = (self._written or frozenset()) | {tensor.path for tensor in written}
        if unknown is not None and not failed:
            raise ActivationCheckpointingError(
                f"{say(unknown.path)} was changed in place in this forward and not in the first, so its value before "
                "is not known and a recompute could differ; run the step again, or leave the block out"
            )


def _copy(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_(value.requires_grad)
