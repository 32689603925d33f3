"""The ``torch`` backend: chunks of tokens, few large in-place operations, any device.

NOTE [ Never [tokens, vocab] ]
Logits exist for one chunk of rows at a time, in one buffer that becomes their gradient in place and is reused by the
next chunk. With ``reduction="sum"`` or ``"mean"`` every row's upstream gradient is one number known to be common to
all, so the gradients of hidden and weight are finished in the forward, while the chunk's logits are there, and the
backward only scales them: three GEMMs in all, none repeated. Where rows have gradients of their own (``"none"``) the
scale must enter before the sum over rows that makes the weight gradient, so the backward computes the logits again.
"""

import contextlib
from typing import Literal

import torch

from ac_loss._job import Job
from ac_loss.backends.torch_backend.chunking import block_rows, chunk_rows, spans
from ac_loss.backends.torch_backend.gradients import Gradients, GradientSums, Wanted


def _sweep(
    job: Job,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    row_weight: torch.Tensor | float | None = None,
    sums: GradientSums | None = None,
) -> torch.Tensor:
    """One pass over the tokens that count.

    Args:
        job: what to compute.
        hidden: ``[N, H]``.
        weight: ``[V, H]``.
        bias: ``[V]`` or None.
        row_weight: factor of each row's gradient, ``[n]`` in the dtype of the losses, or one number.
        sums: receives the gradients of ``sum(row_weight * losses)``; None to compute losses only.

    Returns:
        The losses, ``[n]``.
    """
    labels, rows, wide = job.labels, job.rows, job.loss_dtype
    count, vocab = labels.numel(), weight.shape[0]
    losses = hidden.new_empty(count, dtype=wide)
    # Ranks that share the vocabulary talk once a block: all have the same chunks, each one block.
    shard = job.vocabulary
    size = chunk_rows(count, vocab if shard is None else shard.widest, job.gemm_dtype.itemsize)
    height = min(size, count)
    if shard is None:
        height = min(height, block_rows(hidden.device.type, vocab * wide.itemsize))
    with _autocast_off(hidden.device.type):
        matrix = weight.to(job.gemm_dtype)
        offset = None if bias is None else bias.to(wide)
        buffer = hidden.new_empty((min(size, count), vocab), dtype=job.gemm_dtype)
        scratch = None if job.gemm_dtype == wide else hidden.new_empty((height, vocab), dtype=wide)
        for start, stop in spans(count, size):
            chunk = hidden[start:stop] if rows is None else hidden.index_select(0, rows[start:stop])
            chunk = chunk.to(job.gemm_dtype)
            logits = torch.mm(chunk, matrix.t(), out=buffer[: stop - start])
            for first, last in spans(stop - start, height):
                here = slice(start + first, start + last)
                part = logits[first:last]
                block = part if scratch is None else scratch[: last - first].copy_(part)
                factor = row_weight[here] if isinstance(row_weight, torch.Tensor) else row_weight
                losses[here] = job.objective.evaluate_(block, labels[here], offset, factor, shard)
                if sums is not None:
                    sums.add_block(block)
                    if scratch is not None:
                        part.copy_(block)
            if sums is not None:
                sums.add_chunk(slice(start, stop), logits, chunk, matrix, only=count <= size)
    return losses


def _differentiate(
    job: Job,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    row_weight: torch.Tensor | float,
    wanted: Wanted,
) -> tuple[torch.Tensor, Gradients]:
    sums = GradientSums(job, hidden, weight, bias, wanted)
    losses = _sweep(job, hidden, weight, bias, row_weight=row_weight, sums=sums)
    # Converting the sums allocates again: only now, when the chunk's buffers are gone with the sweep.
    return losses, sums.result()


def _autocast_off(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Dtypes are chosen here; autocast must not choose again, in a backward run under it either."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def _refuse_double_backward() -> None:
    # Gradients are enabled inside a backward only under create_graph=True.
    if torch.is_grad_enabled():
        raise RuntimeError(
            "linear_cross_entropy: a backward with create_graph=True needs second derivatives, which the fused loss "
            "does not have; use ac_loss.reference.linear_cross_entropy, which holds [tokens, vocab] logits"
        )


class _GradInForward(torch.autograd.Function):
    """Sum of the losses over the job's divisor; see NOTE [ Never [tokens, vocab] ]."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, job):
        wanted = Wanted(*ctx.needs_input_grad[:3])
        losses, gradients = _differentiate(job, hidden, weight, bias, row_weight=1.0 / job.divisor, wanted=wanted)
        ctx.save_for_backward(*gradients)
        return losses.sum().div_(job.divisor)

    @staticmethod
    def backward(ctx, upstream):
        _refuse_double_backward()
        # Out of place: under retain_graph=True the next backward finds the same saved gradients.
        scaled = (None if saved is None else saved * upstream for saved in ctx.saved_tensors)
        return *scaled, None


class _GradInBackward(torch.autograd.Function):
    """Losses ``[n]`` of the rows that count; the backward takes a gradient for each."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, job):
        ctx.save_for_backward(hidden, weight, bias)
        ctx.job = job
        return _sweep(job, hidden, weight, bias)

    @staticmethod
    def backward(ctx, upstream):
        _refuse_double_backward()
        wanted = Wanted(*ctx.needs_input_grad[:3])
        gradients = _differentiate(ctx.job, *ctx.saved_tensors, row_weight=upstream, wanted=wanted)[1]
        return *gradients, None


def run(
    job: Job,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    reduction: Literal["none", "sum"],
) -> torch.Tensor:
    """The loss on checked inputs.

    Args:
        job: what to compute.
        hidden: ``[N, H]``.
        weight: ``[V, H]``.
        bias: ``[V]`` or None.
        reduction: ``"sum"``, over the job's divisor, or ``"none"``.

    Returns:
        A scalar, or for ``"none"`` ``[N]`` with 0 at rows that do not count; fp32, or fp64 for fp64 products.
    """
    inputs = (hidden, weight, bias)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    # fp16 has no room for gradients without the loss scale that only the backward knows.
    if needs_grad and reduction == "sum" and job.gemm_dtype != torch.float16:
        return _GradInForward.apply(*inputs, job)
    losses = _GradInBackward.apply(*inputs, job) if needs_grad else _sweep(job, *inputs)
    if reduction == "sum":
        return losses.sum() / job.divisor
    return losses if job.rows is None else losses.new_zeros(hidden.shape[0]).index_copy(0, job.rows, losses)
