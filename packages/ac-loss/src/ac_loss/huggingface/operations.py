"""What lazy logits understand: the steps that models take between their head and their loss."""

from collections.abc import Callable
from math import isfinite
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ac_loss.huggingface import indexing
from ac_loss.huggingface.cross_entropy import cross_entropy
from ac_loss.huggingface.expression import Expression
from ac_loss.huggingface.lazy import LazyLogits, lazy_in, name_of, refuse, understands


def _new(lazy: LazyLogits, expression: Expression, *, view: bool = False) -> LazyLogits:
    made = LazyLogits(expression, lazy.origin)
    if view:
        lazy.aliased = made.aliased = True
    return made


def _elementwise(func: Any, lazy: LazyLogits, expression: Expression) -> LazyLogits:
    """New lazy logits, or `lazy` changed where `func` works in place."""
    name = func.__name__
    in_place = name.startswith("__i") if name.endswith("__") else name.endswith("_")
    if not in_place:
        return _new(lazy, expression)
    if lazy.aliased:
        refuse(name, lazy, "it changes in place what another view of the logits shows too")
    lazy.expression = expression
    return lazy


# Elementwise steps


@understands(torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__)
@understands(Tensor.mul_, Tensor.__imul__)
def _mul(func: Any, left: Any, right: Any) -> LazyLogits:
    lazy, factor = (left, right) if isinstance(left, LazyLogits) else (right, left)
    return _elementwise(func, lazy, _scaled(func, lazy, factor, Expression.times, lambda tensor: tensor))


@understands(torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.divide, Tensor.__truediv__)
@understands(Tensor.div_, Tensor.__itruediv__)
def _div(func: Any, lazy: Any, divisor: Any) -> LazyLogits:
    if not isinstance(lazy, LazyLogits):
        refuse(name_of(func), divisor, "a division by them")
    return _elementwise(func, lazy, _scaled(func, lazy, divisor, Expression.over, torch.reciprocal))


def _scaled(
    func: Any,
    lazy: LazyLogits,
    number: Any,
    by_number: Callable[[Expression, float], Expression],
    as_factor: Callable[[Tensor], Tensor],
) -> Expression:
    expression = lazy.expression
    if expression.log_softmax or expression.absent is not None:
        refuse(name_of(func), lazy, "a scale behind log_softmax, or behind entries that were set")
    if isinstance(number, Real) and number > 0 and isfinite(number):
        return by_number(expression, float(number))
    is_factor = isinstance(number, Tensor) and not isinstance(number, LazyLogits) and number.numel() == 1
    if is_factor and number.dim() <= lazy.dim() and expression.cap is None:
        return expression.folded(as_factor(number.reshape(())))
    what = f"a tensor {list(number.shape)}" if isinstance(number, Tensor) else repr(number)
    return refuse(
        name_of(func), lazy, f"a factor must be a positive number, or in front of a softcap a scalar tensor, not {what}"
    )


@understands(torch.tanh, Tensor.tanh, Tensor.tanh_, F.tanh)
def _tanh(func: Any, lazy: LazyLogits) -> LazyLogits:
    if not lazy.expression.linear:
        refuse(name_of(func), lazy, "a second tanh, or one behind log_softmax or behind entries that were set")
    return _elementwise(func, lazy, lazy.expression.tanh())


@understands(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__)
def _add(func: Any, left: Any, right: Any, *, alpha: float = 1) -> LazyLogits:
    lazy, other = (left, right) if isinstance(left, LazyLogits) else (right, left)
    expression, vocab = lazy.expression, lazy.expression.vocab_size
    if alpha != 1 or not expression.linear or expression.class_dim != -1:
        refuse(name_of(func), lazy, "a sum with a factor, or anywhere but right behind the head")
    if isinstance(other, LazyLogits):
        if other.shape != lazy.shape or not other.expression.linear or other.expression.class_dim != -1:
            refuse(name_of(func), lazy, "a sum of logits of two kinds")
        return _elementwise(func, lazy, expression.plus(other.expression))
    is_bias = isinstance(other, Tensor) and other.shape[-1:] == (vocab,) and other.numel() == vocab
    if not is_bias or other.dim() > lazy.dim():
        what = f"a tensor {list(other.shape)}" if isinstance(other, Tensor) else repr(other)
        refuse(name_of(func), lazy, f"what is added must be one number for each of {vocab} tokens, not {what}")
    return _elementwise(func, lazy, expression.plus_bias(other.reshape(vocab)))


@understands(Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.type, Tensor.type_as)
def _cast(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    def stand_in(value: Any) -> Any:
        # An empty tensor tells which dtype and device are meant, in whichever way they are spelt.
        return torch.empty(0, dtype=value.dtype, device=value.device) if isinstance(value, LazyLogits) else value

    arguments = [stand_in(value) for value in args]
    if not isinstance(tensor, LazyLogits):
        return func(tensor, *arguments, **kwargs)
    meant = func(stand_in(tensor), *arguments, **kwargs)
    if isinstance(meant, str):  # Tensor.type() without an argument
        return meant
    if meant.device != tensor.device or not meant.is_floating_point():
        reason = f"as {meant.dtype} on {meant.device}; to compute the loss, move labels to {tensor.device}"
        refuse(name_of(func), tensor, reason)
    same = meant.dtype == tensor.dtype and not kwargs.get("copy")
    return tensor if same else _new(tensor, tensor.expression.with_dtype(meant.dtype))


@understands(Tensor.contiguous, Tensor.clone, torch.clone)
def _same(func: Any, lazy: LazyLogits, **_: Any) -> LazyLogits:
    return _new(lazy, lazy.expression, view=func is Tensor.contiguous)


@understands(Tensor.detach, torch.detach)
def _detach(_: Any, lazy: LazyLogits) -> LazyLogits:
    return _new(lazy, lazy.expression.detached(), view=True)


@understands(F.log_softmax, torch.log_softmax, Tensor.log_softmax)
def _log_softmax(func: Any, lazy: LazyLogits, dim: int | None = None, *args: Any, **kwargs: Any) -> LazyLogits:
    expression = lazy.expression
    if dim not in (expression.class_dim, lazy.dim() + expression.class_dim) or expression.log_softmax:
        refuse(name_of(func), lazy, "over another dimension than the vocabulary, or a second time")
    dtype = next((value for value in (*args, kwargs.get("dtype")) if isinstance(value, torch.dtype)), lazy.dtype)
    return _new(lazy, expression.normalised(dtype))


# Rows


@understands(Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten)
@understands(Tensor.squeeze, torch.squeeze, Tensor.unsqueeze, torch.unsqueeze, Tensor.view_as, Tensor.reshape_as)
def _reshape(func: Any, lazy: Any, *args: Any, **kwargs: Any) -> LazyLogits:
    if not isinstance(lazy, LazyLogits) or any(lazy_in(args)) or (args and isinstance(args[0], torch.dtype)):
        refuse(name_of(func), next(lazy_in([lazy, args])), "as the pattern of another tensor, or as other numbers")
    shape = indexing.shape_after(func, lazy.shape, args, kwargs)
    if lazy.expression.class_dim != -1 or shape[-1:] != (lazy.expression.vocab_size,):
        refuse(name_of(func), lazy, f"into {list(shape)}; the vocabulary has to stay the last dimension")
    return _new(lazy, lazy.expression.rows(lambda hidden: hidden.reshape(*shape[:-1], hidden.shape[-1])), view=True)


@understands(Tensor.transpose, torch.transpose, Tensor.swapaxes, Tensor.permute, torch.permute, Tensor.movedim)
@understands(torch.movedim, torch.swapaxes)
def _permute(func: Any, lazy: LazyLogits, *args: Any, **kwargs: Any) -> LazyLogits:
    return _new(lazy, indexing.permuted(lazy.expression, func, args, kwargs), view=True)


@understands(Tensor.__getitem__)
def _getitem(func: Any, lazy: Any, index: Any) -> LazyLogits:
    if not isinstance(lazy, LazyLogits) or any(lazy_in([index])):
        refuse(name_of(func), next(lazy_in([lazy, index])), "they cannot be an index")
    made = indexing.item(lazy.expression, index)
    if made is None:
        refuse(name_of(func), lazy, "a choice within the vocabulary other than a range of it")
    return _new(lazy, made, view=True)


@understands(Tensor.__setitem__)
def _setitem(func: Any, lazy: Any, index: Any, value: Any) -> None:
    if not isinstance(lazy, LazyLogits) or isinstance(value, LazyLogits):
        refuse(name_of(func), next(lazy_in([lazy, value])), "they cannot be written into another tensor")
    columns = indexing.whole_columns(lazy.expression, index)
    lowest = torch.finfo(lazy.dtype).min
    is_lowest = isinstance(value, Real) and value <= lowest
    if columns is None or not is_lowest or not lazy.expression.linear or lazy.aliased:
        refuse(name_of(func), lazy, f"understood is logits[..., tokens] = {lowest:.3g} or -inf, right behind the head")
    lazy.expression = lazy.expression.without(columns)


# The loss


@understands(F.cross_entropy, F.nll_loss)
def _cross_entropy(  # noqa: PLR0917 - torch's signature
    func: Any,
    input: Any,  # noqa: A002 - torch's name
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    lazy = next(lazy_in([input, target, weight]))
    expression = lazy.expression
    if lazy is not input:
        refuse(name_of(func), lazy, "they are the target or the weights")
    if weight is not None or size_average is not None or reduce is not None:
        refuse(name_of(func), lazy, "with class weights, size_average or reduce")
    if target.is_floating_point():
        refuse(name_of(func), lazy, "against probabilities")
    if expression.log_softmax != (func is F.nll_loss):
        refuse(name_of(func), lazy, "nll_loss goes with log_softmax, and cross_entropy without")
    if lazy.dim() > 1 and expression.class_dim != 1 - lazy.dim():
        refuse(name_of(func), lazy, "the classes have to be in dimension 1")
    if expression.absent is not None and (label_smoothing or lazy.origin.config.label_smoothing):
        refuse(name_of(func), lazy, "with label smoothing over entries that were set")
    return cross_entropy(
        expression,
        lazy.origin,
        target,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
