"""Logits as a tensor that has a shape and no values."""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from ac_loss.huggingface.errors import FusedLossError
from ac_loss.huggingface.expression import Expression
from ac_loss.huggingface.origin import Origin, caller, cost

# NOTE [ Lazy logits ]
# 1. Understood exactly, or an error: what is neither in `_METADATA` nor registered with `understands` raises. Nothing
#    computes logits unasked.
# 2. An operation gives a new object. Where torch gives a view, the new object and the one it was made from both
#    remember it, and neither can be changed in place any more: the other would not show the change.
# 3. They are no part of the graph (`requires_grad` is False); what is computed from them is.


class LazyLogits(Tensor):
    """What a model's head returns in training: the shape, dtype and device of its logits, and how to compute them.

    It understands what models do between head and loss (`operations.py`). Anything else raises `FusedLossError`.
    """

    expression: Expression
    origin: Origin
    aliased: bool

    @staticmethod
    def __new__(cls, expression: Expression, origin: Origin) -> "LazyLogits":
        device = expression.hidden[0].device
        lazy = Tensor._make_wrapper_subclass(cls, expression.shape, dtype=expression.dtype, device=device)
        lazy.expression, lazy.origin, lazy.aliased = expression, origin, False
        return lazy

    def materialize(self) -> Tensor:
        """The logits, computed now and differentiable, in as much memory as without the fused loss.

        Raises:
            FusedLossError: the head's weight is not there any more, or is not the one they were to be computed from.
        """
        return self.origin.run(self.expression.compute)

    def __repr__(self, **_: Any) -> str:
        return f"LazyLogits(shape={list(self.shape)}, dtype={self.dtype}, model={self.origin.model}; .materialize())"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse("pickling", self)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse("deepcopy", self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func not in _OPERATIONS:
            refuse(name_of(func), next(lazy_in([args, kwargs])))
        return _OPERATIONS[func](func, *args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse(str(func), next(lazy_in([args, kwargs])))


def refuse(operation: str, lazy: LazyLogits, reason: str = "") -> NoReturn:
    """Raise for something that needs values."""
    raise FusedLossError(
        f"{operation} of the logits of {lazy.origin.model} at {caller()}{reason and f' ({reason})'}: in training with "
        f"labels the fused loss takes the place of these logits, and this needs them in full: {cost(lazy.shape)}. "
        "Call logits.materialize() first if that is wanted, read logits under model.eval() or torch.no_grad(), or take "
        "the fused loss off with ac_loss.huggingface.remove_fused_loss(model)"
    )


def understands(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers what computes `functions` of lazy logits: called with the function and with its arguments."""

    def register(operation: Callable[..., Any]) -> Callable[..., Any]:
        _OPERATIONS.update(dict.fromkeys(functions, operation))
        return operation

    return register


def name_of(func: Any) -> str:
    """How a function that `__torch_function__` was given is called by those who call it."""
    name = getattr(func, "__name__", str(func))
    return f"Tensor.{func.__self__.__name__}" if name in ("__get__", "__set__") else name


def lazy_in(tree: Any) -> Iterator[LazyLogits]:
    """Every one in nested lists, tuples and dicts."""
    if isinstance(tree, LazyLogits):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for part in tree:
            yield from lazy_in(part)
    elif isinstance(tree, dict):
        yield from lazy_in(list(tree.values()))


_OPERATIONS: dict[Any, Callable[..., Any]] = {}

_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "itemsize", "nbytes"),
    *("is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_quantized", "is_nested", "_version"),
)

_METADATA = frozenset(getattr(Tensor, name).__get__ for name in _PROPERTIES) | {
    Tensor.size,
    Tensor.stride,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.nelement,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.is_contiguous,
    Tensor.get_device,
    Tensor.__len__,
    torch.numel,
    torch.is_floating_point,
    torch.is_complex,
}
"""What has the same answer as for the real logits (the graph apart: see the NOTE) and needs no values."""
