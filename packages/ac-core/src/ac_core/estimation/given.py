"""Floating-point numbers that the caller gave, found again behind the fake tensors that are made of them.

A fake tensor takes the place of a real one of the batch, and of every view, cast and join of such. Reading one makes
the same of the real ones, so that what nobody asks for costs nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
_COPIES = (aten._to_copy.default, aten.clone.default, aten.cat.default, aten.stack.default)
_NAME = "_ac_given"
"""The attribute of a fake tensor, which lives as long as it does."""


@dataclass
class _Memory:
    """What views share. changed: something was written there, which the values that were given do not have."""

    changed: bool = False


@dataclass(frozen=True)
class _Given:
    read: Callable[[], Tensor]
    memory: _Memory


def stand_in(fake: Tensor, real: Tensor) -> None:
    """Let `fake` stand for the values of `real`, of the same shape."""
    setattr(fake, _NAME, _Given(real.detach, _Memory()))


def follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """The operation `func` has given `result`: see what that stands for."""
    shares, writes = func.is_view, func._schema.is_mutable
    if not (shares or writes or func in _COPIES):
        return
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    known = [given for tensor in tensors if (given := _given(tensor)) is not None]
    if writes:
        for given in known:
            given.memory.changed = True
    elif known and len(known) == len(tensors):
        _follow(func, args, kwargs, result, known[0].memory if shares else _Memory())


def _follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, memory: _Memory) -> None:
    reads = tree_map(lambda leaf: _given(leaf).read if isinstance(leaf, Tensor) else leaf, (args, kwargs))

    def read(place: int) -> Tensor:
        real_args, real_kwargs = tree_map(lambda leaf: leaf() if callable(leaf) else leaf, reads)
        return tree_leaves(func(*real_args, **real_kwargs))[place]

    for place, fake in enumerate(tree_leaves(result)):
        setattr(fake, _NAME, _Given(lambda place=place: read(place), memory))


def values_of(fake: Tensor) -> Tensor | None:
    """What `fake` stands for, or `None` where that is not known; to be called outside of the fake mode."""
    given = _given(fake)
    return None if given is None else given.read().cpu()


def _given(tensor: Tensor) -> _Given | None:
    """What a tensor stands for, as long as nothing was written there."""
    given: _Given | None = getattr(tensor, _NAME, None)
    return None if given is None or given.memory.changed else given
