"""Logits that are not computed: the matrix product they would be, and the elementwise steps behind it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ac_loss.huggingface.errors import FusedLossError


class Product(NamedTuple):
    """``softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)``; without a softcap, the argument of its tanh
    times it."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    logit_scale: float
    softcap: float | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Expression:
    """``cap * tanh(up / down * (sum of hidden_i @ weight_i.T + bias))``, without ``cap * tanh`` where `cap` is None.

    Attributes:
        hidden: ``[..., H_i]``, all with the same leading dimensions.
        weight: ``[V, H_i]``, one for each of `hidden`: more than one where a LoRA adapter adds to the head.
        bias: ``[V]``.
        dtype: what the logits would have; the loss is fp32 (fp64 for fp64) all the same.
        autocast: the dtype in which autocast would have multiplied, None where it was off.
        up, down: multiplied and divided by since the product; apart, so that dividing by a cap and multiplying by it
            leaves exactly 1.
        cap: multiplied by since the tanh.
        log_softmax: whether the logits are normalised; only the loss of a label can be asked for then.
        class_dim: where the vocabulary is, counted from the end: -1, unless the model has moved it for the loss.
        absent: ``[n]`` int64, entries of the vocabulary whose logits were overwritten by a value that leaves them no
            probability.
    """

    hidden: tuple[Tensor, ...]
    weight: tuple[Tensor, ...]
    bias: Tensor | None
    dtype: torch.dtype
    autocast: torch.dtype | None = None
    up: float = 1.0
    down: float = 1.0
    cap: float | None = None
    log_softmax: bool = False
    class_dim: int = -1
    absent: Tensor | None = None

    @property
    def vocab_size(self) -> int:
        return self.weight[0].shape[0]

    @property
    def shape(self) -> torch.Size:
        shape = list(self.hidden[0].shape[:-1])
        shape.insert(len(shape) + 1 + self.class_dim, self.vocab_size)
        return torch.Size(shape)

    @property
    def linear(self) -> bool:
        """Whether nothing but scales stands behind the product."""
        return self.cap is None and not self.log_softmax and self.absent is None

    def rows(self, take: Callable[[Tensor], Tensor]) -> "Expression":
        """`take` does to ``[..., H]`` what was asked of the leading dimensions of the logits."""
        return replace(self, hidden=tuple(take(hidden) for hidden in self.hidden))

    def columns(self, start: int, stop: int) -> "Expression":
        """Part of the vocabulary."""
        bias = None if self.bias is None else self.bias[start:stop]
        return replace(self, weight=tuple(weight[start:stop] for weight in self.weight), bias=bias)

    def times(self, factor: float) -> "Expression":
        return replace(self, up=self.up * factor) if self.cap is None else replace(self, cap=self.cap * factor)

    def over(self, divisor: float) -> "Expression":
        return replace(self, down=self.down * divisor) if self.cap is None else replace(self, cap=self.cap / divisor)

    def tanh(self) -> "Expression":
        return replace(self, cap=1.0)

    def folded(self, factor: float | Tensor = 1.0) -> "Expression":
        """The same logits times `factor`, with every scale inside of the hidden states and the bias."""
        factor = factor * (self.up / self.down)
        if isinstance(factor, float) and factor == 1.0:
            return replace(self, up=1.0, down=1.0)
        # A factor of shape [1] may be wider, and must not widen them.
        hidden = tuple((hidden * factor).to(hidden.dtype) for hidden in self.hidden)
        bias = None if self.bias is None else (_present(self.bias) * factor).to(self.bias.dtype)
        return replace(self, hidden=hidden, bias=bias, up=1.0, down=1.0)

    def plus(self, other: "Expression") -> "Expression":
        """The sum of two products over the same rows: one product of the hidden states side by side."""
        left, right = self.folded(), other.folded()
        dtype = torch.promote_types(left.dtype, right.dtype)
        joined = replace(left, hidden=left.hidden + right.hidden, weight=left.weight + right.weight, dtype=dtype)
        return joined if right.bias is None else joined.plus_bias(right.bias)

    def plus_bias(self, bias: Tensor) -> "Expression":
        """`bias`: ``[V]``."""
        left = self.folded()
        return replace(left, bias=bias if left.bias is None else _present(left.bias) + _present(bias))

    def product(self) -> Product:
        """What the loss takes, one hidden and one weight, in one dtype unless autocast chooses it."""
        hidden, weight, bias = self.hidden[0], self.weight[0], self.bias
        if len(self.hidden) > 1:
            dtype = self.autocast or reduce(torch.promote_types, (part.dtype for part in (*self.hidden, *self.weight)))
            hidden = torch.cat([part.to(dtype) for part in self.hidden], dim=-1)
            weight = torch.cat([part.to(dtype) for part in self.weight], dim=1)
        if self.absent is not None:
            bias = weight.new_zeros(self.vocab_size) if bias is None else bias
            bias = bias.index_fill(0, self.absent, torch.finfo(bias.dtype).min)
        if bias is not None and self.autocast is None:
            bias = bias.to(hidden.dtype)
        if self.cap is None:
            return Product(hidden, weight, bias, self.up / self.down, None)
        # cap * tanh(s * x) is the softcap `cap` behind the scale s * cap.
        return Product(hidden, weight, bias, self.up * self.cap / self.down, self.cap)

    def with_dtype(self, dtype: torch.dtype) -> "Expression":
        return replace(self, dtype=dtype)

    def normalised(self, dtype: torch.dtype) -> "Expression":
        """Behind log_softmax."""
        return replace(self, log_softmax=True, dtype=dtype)

    def without(self, columns: Tensor) -> "Expression":
        """With no probability for some of the vocabulary; `columns`: ``[n]`` int64."""
        return replace(self, absent=columns)

    def detached(self) -> "Expression":
        hidden, weight = (tuple(part.detach() for part in parts) for parts in (self.hidden, self.weight))
        return replace(self, hidden=hidden, weight=weight, bias=None if self.bias is None else self.bias.detach())

    def compute(self) -> Tensor:
        """The logits, differentiable."""
        with self.in_its_autocast():
            logits = F.linear(self.hidden[0], self.weight[0], self.bias if len(self.hidden) == 1 else None)
            for hidden, weight in zip(self.hidden[1:], self.weight[1:], strict=True):
                logits = logits + F.linear(hidden, weight)
        if len(self.hidden) > 1 and self.bias is not None:
            logits = logits + self.bias
        logits = logits.to(self.dtype)
        if self.up != 1.0:
            logits = logits * self.up
        if self.down != 1.0:
            logits = logits / self.down
        if self.cap is not None:
            logits = torch.tanh(logits) * self.cap
        if self.absent is not None:
            logits = logits.index_fill(-1, self.absent, torch.finfo(self.dtype).min)
        if self.log_softmax:
            logits = logits.log_softmax(-1)
        return logits.movedim(-1, self.class_dim)

    def in_its_autocast(self) -> AbstractContextManager[object]:
        """Autocast as it was when the head ran."""
        device = self.hidden[0].device.type
        if not torch.amp.is_autocast_available(device):
            return nullcontext()
        return torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None)


def _present(bias: Tensor) -> Tensor:
    if not bias.untyped_storage().size():
        raise FusedLossError(
            "the model scales or adds to its logits after FSDP2 has freed the head's bias; leave the head to the "
            "root's unit, or take the fused loss off with ac_loss.huggingface.remove_fused_loss(model)"
        )
    return bias
