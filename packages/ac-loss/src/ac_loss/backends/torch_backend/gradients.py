"""Gradients of hidden, weight and bias, summed over chunks of tokens."""

from typing import NamedTuple

import torch

from ac_loss._job import Job
from ac_loss.backends.torch_backend.chunking import slab_rows, spans
from ac_loss.backends.torch_backend.products import Projection, add_product


class Wanted(NamedTuple):
    """Which gradients to compute."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False


class Gradients(NamedTuple):
    """Gradients of hidden ``[N, H]``, weight ``[V, H]`` and bias ``[V]``; None where not wanted.

    In the dtypes of their tensors, but for a weight gradient that is yet to be added to ``main_grad``.
    """

    hidden: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None


class GradientSums:
    """Receives one chunk of logit gradients after the other; nothing exists here for a gradient that is not wanted."""

    def __init__(
        self, job: Job, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: Wanted
    ) -> None:
        self._rows = job.rows
        self._hidden = self._weight = self._bias = None
        if wanted.hidden:
            # Only rows that count are written below.
            self._hidden = torch.empty_like(hidden) if job.rows is None else torch.zeros_like(hidden)
        if wanted.weight:
            self._weight = WeightGradient(weight, job)
        if wanted.bias and bias is not None:
            self._bias, self._bias_dtype = torch.zeros_like(bias, dtype=job.loss_dtype), bias.dtype

    @property
    def sum_bytes(self) -> int:
        """See ``chunking.chunk_rows``."""
        return 0 if self._weight is None else self._weight.sum_bytes

    def add_block(self, grad_logits: torch.Tensor) -> None:
        """Part of a chunk, ``[rows, V]`` in the dtype of the losses, before it is rounded."""
        if self._bias is not None:
            self._bias.add_(grad_logits.sum(0))

    def add_chunk(
        self, rows: slice, grad_logits: torch.Tensor, hidden: torch.Tensor, weight: Projection, *, only: bool
    ) -> None:
        """The rows that count from ``rows.start`` to ``rows.stop``.

        Args:
            rows: which ones, among the rows that count.
            grad_logits: ``[rows, V]``.
            hidden: ``[rows, H]`` in the dtype of ``grad_logits``.
            weight: ``[V, H]``.
            only: whether there is no other chunk.
        """
        if self._hidden is not None:
            part = weight.gradient(grad_logits)
            if self._rows is None:
                self._hidden[rows] = part
            else:
                self._hidden.index_copy_(0, self._rows[rows], part.to(self._hidden.dtype))
        if self._weight is not None:
            self._weight.add(grad_logits, hidden, only=only)

    def result(self) -> Gradients:
        return Gradients(
            self._hidden,
            None if self._weight is None else self._weight.result(),
            None if self._bias is None else self._bias.to(self._bias_dtype),
        )


class WeightGradient:
    """Sum over chunks of ``grad_logits.T @ hidden``.

    Args:
        weight: the rows of the weight that it is the gradient of, ``[R, H]``.
        job: says in which dtype to sum.
        into: ``[R, H]``, receives the sum on top of what it holds; None for a tensor of its own.
    """

    def __init__(self, weight: torch.Tensor, job: Job, into: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._sum_dtype = weight.dtype if job.accum == "param" else torch.promote_types(weight.dtype, job.loss_dtype)
        # main_grad is wider than the parameter: rounding to the parameter's dtype on the way would be for nothing.
        self._keep_dtype = job.accum == "main_grad"
        self._sum = into

    @property
    def sum_bytes(self) -> int:
        """Of a sum over several chunks that is not what is kept in the end."""
        if self._keep_dtype or self._sum_dtype == self._weight.dtype:
            return 0
        return self._weight.numel() * self._sum_dtype.itemsize

    def add(self, grad_logits: torch.Tensor, hidden: torch.Tensor, *, only: bool) -> None:
        """One chunk, ``[rows, R]`` and ``[rows, H]`` in one dtype; ``only`` if there is no other."""
        left = grad_logits.t()
        if self._sum is not None:
            add_product(self._sum, left, hidden)
            return
        dtype = self._sum_dtype
        if only:  # nothing to sum: in the dtype that it is wanted in, or for main_grad as the product comes
            dtype = hidden.dtype if self._keep_dtype else self._weight.dtype
        # A tensor of ours: a selective checkpoint around the loss keeps results of `mm`, and this one changes.
        self._sum = hidden.new_empty(self._weight.shape, dtype=dtype)
        add_product(self._sum, left, hidden, first=True)

    def result(self) -> torch.Tensor:
        if self._sum is None:
            return torch.zeros_like(self._weight, memory_format=torch.contiguous_format)
        return self._sum if self._keep_dtype else self._sum.to(self._weight.dtype)


def add_scaled(target: torch.Tensor, gradient: torch.Tensor, upstream: torch.Tensor) -> None:
    """``target += gradient * upstream`` for a 0-d ``upstream``: no copy of ``gradient``, no wait for a device."""
    factor = upstream.to(target.dtype)
    height, width = target.shape
    same = gradient.dtype == target.dtype
    rows = max(1, height) if same else slab_rows(target.device.type, width * target.element_size())
    for start, stop in spans(height, rows):
        target[start:stop].addcmul_(gradient[start:stop].to(target.dtype), factor)
