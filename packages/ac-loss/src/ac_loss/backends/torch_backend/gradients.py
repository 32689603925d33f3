"""Gradients of hidden, weight and bias, summed over chunks of tokens."""

from typing import NamedTuple

import torch

from ac_loss._job import Job
from ac_loss.backends.torch_backend.chunking import slab_rows, spans


class Wanted(NamedTuple):
    """Which gradients to compute."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False


class Gradients(NamedTuple):
    """Gradients of hidden ``[N, H]``, weight ``[V, H]`` and bias ``[V]`` in their dtypes; None where not wanted."""

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
            self._weight = _WeightGradient(weight, job)
        if wanted.bias and bias is not None:
            self._bias, self._bias_dtype = torch.zeros_like(bias, dtype=job.loss_dtype), bias.dtype

    def add_block(self, grad_logits: torch.Tensor) -> None:
        """Part of a chunk, ``[rows, V]`` in the dtype of the losses, before it is rounded."""
        if self._bias is not None:
            self._bias.add_(grad_logits.sum(0))

    def add_chunk(
        self, rows: slice, grad_logits: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, *, only: bool
    ) -> None:
        """The rows that count from ``rows.start`` to ``rows.stop``.

        Args:
            rows: which ones, among the rows that count.
            grad_logits: ``[rows, V]``.
            hidden: ``[rows, H]`` in the dtype of ``grad_logits``.
            weight: ``[V, H]`` in the dtype of ``grad_logits``.
            only: whether there is no other chunk.
        """
        if self._hidden is not None:
            part = grad_logits @ weight
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


class _WeightGradient:
    """Sum over chunks of ``grad_logits.T @ hidden``, ``[V, H]``."""

    def __init__(self, weight: torch.Tensor, job: Job) -> None:
        self._dtype = weight.dtype
        self._sum_dtype = weight.dtype if job.accum == "param" else torch.promote_types(weight.dtype, job.loss_dtype)
        self._zero = weight.new_zeros
        self._shape = weight.shape
        self._sum: torch.Tensor | None = None

    def add(self, grad_logits: torch.Tensor, hidden: torch.Tensor, *, only: bool) -> None:
        if only:
            self._sum = grad_logits.t() @ hidden
        elif self._sum_dtype == hidden.dtype:
            if self._sum is None:
                self._sum = grad_logits.t() @ hidden
            else:
                self._sum.addmm_(grad_logits.t(), hidden)
        else:
            self._add_converted(grad_logits, hidden)

    def _add_converted(self, grad_logits: torch.Tensor, hidden: torch.Tensor) -> None:
        # The product must stay in the narrow dtype (a bf16 GEMM is over twice as fast) and be summed in the wide one;
        # a slab of the vocabulary at a time, for at real sizes the whole product would be a GiB.
        vocab, width = self._shape
        first = self._sum is None
        if self._sum is None:
            self._sum = hidden.new_empty(self._shape, dtype=self._sum_dtype)
        rows = min(vocab, slab_rows(hidden.device.type, width * hidden.element_size()))
        slab = hidden.new_empty(rows, width)
        for start, stop in spans(vocab, rows):
            part = torch.mm(grad_logits[:, start:stop].t(), hidden, out=slab[: stop - start])
            target = self._sum[start:stop]
            target.copy_(part) if first else target.add_(part)

    def result(self) -> torch.Tensor:
        return self._zero(self._shape) if self._sum is None else self._sum.to(self._dtype)
