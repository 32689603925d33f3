"""Places that hold state, and copies of what they hold."""

import copy
from collections.abc import Callable, Hashable, MutableMapping
from typing import Any

import torch

# NOTE [ Copies of state ]
#
# 1. A kept copy holds no graph: the graph holds the region, which would then never be freed.
# 2. It requires a gradient where the original does, so that the recompute saves the same tensors as the forward; and
#    what the recompute works on is no leaf, so that it may be added to in place.
# 3. Tensors that are one object in several places are one in the copies.


class Place:
    """Some or all entries of a dict: of a mapping, of a module's buffers, or of its attributes.

    Args:
        holder: the dict that is read and written.
        names: which entries; None for all, also those that are yet to come.
    """

    def __init__(self, holder: MutableMapping[Any, Any], names: tuple[Hashable, ...] | None = None) -> None:
        self._holder = holder
        self._names = names

    def read(self) -> dict[Any, Any]:
        """The entries that are there."""
        if self._names is None:
            return dict(self._holder)
        return {name: self._holder[name] for name in self._names if name in self._holder}

    def exchange(self, entries: dict[Any, Any]) -> dict[Any, Any]:
        """Puts `entries` in the place of those that are there, and returns these."""
        before = self.read()
        for name in before:
            del self._holder[name]
        self._holder.update(entries)
        return before

    @staticmethod
    def holds(value: object) -> bool:
        """Whether a copy of `value` is independent of it."""
        return value is None or isinstance(value, torch.Tensor | int | float | complex | str | list | tuple | dict)


def kept_copy(value: Any, memo: dict[int, Any]) -> Any:
    """A copy to keep; see NOTE [ Copies of state ]."""
    return _copied(value, memo, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))


def scratch_copy(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of a kept copy to work on."""
    return _copied(value, memo, torch.clone)


def _copied(value: Any, memo: dict[int, Any], of_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in memo:
            memo[id(value)] = of_tensor(value)
        return memo[id(value)]
    if isinstance(value, dict):
        copied = copy.copy(value)  # of a subclass too, with what it holds besides
        for key, item in value.items():
            copied[key] = _copied(item, memo, of_tensor)
        return copied
    if isinstance(value, list):
        return [_copied(item, memo, of_tensor) for item in value]
    if isinstance(value, tuple):
        items = [_copied(item, memo, of_tensor) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
