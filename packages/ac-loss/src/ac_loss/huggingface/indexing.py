"""What an operation on logits ``[..., V]`` does to the hidden states ``[..., H]`` that they come from."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ac_loss.huggingface.expression import Expression

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


def shape_after(func: Any, shape: torch.Size, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Size:
    """The shape that `func`, which keeps the order of elements, gives to a tensor of `shape`."""
    # One element, expanded: not even an instrument that counts bytes sees logits here.
    return func(torch.empty(1, device="meta").expand(shape), *args, **kwargs).shape


def permuted(expression: Expression, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Expression:
    """`func` changes the order of dimensions."""
    # Dimensions of different sizes show where each of them went.
    sizes = _PRIMES[: len(expression.shape)]
    order = [sizes.index(size) for size in func(torch.empty(sizes, device="meta"), *args, **kwargs).shape]
    before = len(order) + expression.class_dim
    rows = [place - (place > before) for place in order if place != before]
    moved = expression.rows(lambda hidden: hidden.permute(*rows, -1))
    return replace(moved, class_dim=order.index(before) - len(order))


def item(expression: Expression, index: Any) -> Expression | None:
    """``logits[index]`` where it chooses rows and leaves the vocabulary, or a range of it, as the last dimension."""
    parts = _spelt_out(expression, index)
    if parts is None:
        return None
    *rows, columns = parts
    if not isinstance(columns, slice):
        return None
    start, stop, step = columns.indices(expression.vocab_size)
    if step != 1 or stop <= start:
        return None
    if (start, stop) != (0, expression.vocab_size):
        if expression.log_softmax or expression.absent is not None:
            return None
        expression = expression.columns(start, stop)
    return expression.rows(lambda hidden: hidden[(*rows, slice(None))])


def whole_columns(expression: Expression, index: Any) -> Tensor | None:
    """``[n]`` int64: which of the vocabulary ``logits[index]`` shows, where that is the same in all rows."""
    parts = _spelt_out(expression, index)
    if parts is None or not all(isinstance(part, slice) and part == slice(None) for part in parts[:-1]):
        return None
    return torch.arange(expression.vocab_size, device=expression.hidden[0].device)[parts[-1]].reshape(-1)


def _spelt_out(expression: Expression, index: Any) -> list[Any] | None:
    """`index` with slices for the ellipsis, the last entry being the vocabulary's; None where that is not last."""
    parts = list(index) if isinstance(index, tuple) else [index]
    parts = [torch.tensor(part) if isinstance(part, list) else part for part in parts]
    missing = len(expression.shape) - sum(_takes(part) for part in parts)
    if expression.class_dim != -1 or missing < 0:
        return None
    at = next((place for place, part in enumerate(parts) if part is Ellipsis), len(parts))
    parts[at : at + 1] = [slice(None)] * missing
    # A mask over the last dimensions, or a new one behind them, takes the vocabulary from its place.
    return parts if _takes(parts[-1]) == 1 and parts[-1] is not None else None


def _takes(part: Any) -> int:
    """How many dimensions an entry of an index stands for."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) else 1
