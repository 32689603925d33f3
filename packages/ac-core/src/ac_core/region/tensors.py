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
    """A tensor as a forward found it. Stands for the tensor in what is remembered of its holder."""

    def __init__(self, value: Tensor, path: Path, copy: Tensor | None, always: bool) -> None:
        # Only what a recompute can use: a loss of an earlier step must not keep the graph of that step, and through
        # the checkpoint regions in it those of all steps before, alive.
        self.value = value if value.grad_fn is None else value.detach().requires_grad_()
        self.path = path
        self.version = value._version
        self.copy = copy
        self.always = always

    @property
    def written(self) -> bool:
        return self.value._version != self.version

    def as_found(self, copies: dict[int, Tensor], say: Callable[[Path], str]) -> Tensor:
        """What a recompute finds in this tensor's place; `copies` are those of this recompute.

        Whole tensors are exchanged rather than values copied: an in-place write would count as a change of what the
        graph has saved.
        """
        if self.copy is not None:
            return copies.setdefault(id(self.copy), _copy(self.copy))
        if self.written:
            raise ActivationCheckpointingError(
                f"{say(self.path)} was modified in place since the forward, so the recompute would give gradients of "
                "another function; run backward before it is modified"
            )
        return self.value


def _copy(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_(value.requires_grad)


class TensorLearner:
    """Which tensors of a block its forward writes.

    Small vectors are always copied before a forward. Of the others, the first forward copies every one; from then on
    only those that it saw written are, so that a block with large constants (a mask, quantised weights) pays nothing
    for them. One that is written later and not at first is an error.
    """

    def __init__(self) -> None:
        self.written: frozenset[Path] | None = None

    def hold(self, value: Tensor, path: Path, copies: dict[int, Tensor]) -> HeldTensor:
        """`value` before a forward; `copies` are those of this forward, so that one tensor in two places stays one."""
        always = value.dim() <= 1 and value.numel() <= _SMALL
        copy = None
        if always or self.written is None or path in self.written:
            copy = copies.setdefault(id(value), _copy(value))
        return HeldTensor(value, path, copy, always)

    def settle(self, held: list[HeldTensor], say: Callable[[Path], str], *, failed: bool) -> None:
        """After a forward: learn what it wrote, and let the copies of all other tensors go."""
        written = frozenset(tensor.path for tensor in held if tensor.written)
        unknown = [tensor for tensor in held if tensor.written and tensor.copy is None]
        for tensor in held:
            if not (tensor.written or tensor.always):
                tensor.copy = None
        if unknown:
            self.written = (self.written or frozenset()) | written
            if not failed:
                raise ActivationCheckpointingError(
                    f"{say(unknown[0].path)} was changed in place in this forward and not in the first, so its value "
                    "before is not known and a recompute could differ; run the step again, or leave the block out"
                )
        elif self.written is None and not failed:
            self.written = written
