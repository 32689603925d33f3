"""The ``torch`` backend: chunks of tokens, few large in-place operations, any device.

NOTE [ Never [tokens, vocab] ]
Logits exist for one chunk of rows at a time, in one buffer that becomes their gradient in place and is reused by the
next chunk. With ``reduction="sum"`` or ``"mean"`` every row's upstream gradient is one number known to be common to
all, so the gradients of hidden and weight are finished in the forward, while the chunk's logits are there, and the
backward only scales them: three GEMMs in all, none repeated. Where rows have gradients of their own (``"none"``) the
scale must enter before the sum over rows that makes the weight gradient, so the backward computes the logits again:
see NOTE [ Tiles ] in statistics.py.
"""

from typing import Literal

import torch

from ac_loss._job import Job
from ac_loss._main_grad import main_grad_of, mark_added
from ac_loss._validation import rounds_to_float16
from ac_loss.backends.torch_backend.chunking import block_rows, chunk_rows, spans
from ac_loss.backends.torch_backend.gradients import Gradients, GradientSums, Wanted, add_scaled
from ac_loss.backends.torch_backend.guards import autocast_off, refuse_double_backward, take_saved
from ac_loss.backends.torch_backend.products import Projection, operand, product_dtype
from ac_loss.backends.torch_backend.statistics import row_statistics


def _sweep(
    job: Job,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    row_weight: float | None = None,
    sums: GradientSums | None = None,
) -> torch.Tensor:
    """One pass over the tokens that count.

    Args:
        job: what to compute.
        hidden: ``[N, H]``.
        weight: ``[V, H]``.
        bias: ``[V]`` or None.
        row_weight: factor of every row's gradient.
        sums: receives the gradients of ``row_weight * losses.sum()``; None to compute losses only.

    Returns:
        The losses, ``[n]``.
    """
    labels, rows, wide = job.labels, job.rows, job.loss_dtype
    count, vocab = labels.numel(), weight.shape[0]
    narrow = product_dtype(job.gemm_dtype, hidden.device.type, count)
    losses = hidden.new_empty(count, dtype=wide)
    # Ranks that share the vocabulary talk once a block: all have the same chunks, each one block.
    shard = job.vocabulary
    if shard is None:
        size = chunk_rows(count, vocab, narrow.itemsize, sum_bytes=0 if sums is None else sums.sum_bytes)
    else:  # by nothing that a rank may have alone, a frozen weight for one
        size = chunk_rows(count, shard.widest, narrow.itemsize)
    height = min(size, count)
    if shard is None:
        height = min(height, block_rows(hidden.device.type, vocab * wide.itemsize))
    with autocast_off(hidden.device.type):
        projection = Projection(weight, job.gemm_dtype, narrow)
        offset = None if bias is None else bias.to(wide)
        buffer = hidden.new_empty((min(size, count), vocab), dtype=narrow)
        scratch = None if narrow == wide else hidden.new_empty((height, vocab), dtype=wide)
        for start, stop in spans(count, size):
            chunk = hidden[start:stop] if rows is None else hidden.index_select(0, rows[start:stop])
            chunk = operand(chunk, job.gemm_dtype, narrow)
            logits = projection.logits(chunk, buffer[: stop - start])
            for first, last in spans(stop - start, height):
                here = slice(start + first, start + last)
                part = logits[first:last]
                block = part if scratch is None else scratch[: last - first].copy_(part)
                losses[here] = job.objective.evaluate_(block, labels[here], offset, row_weight, shard)
                if sums is not None:
                    sums.add_block(block)
                    if scratch is not None:
                        part.copy_(block)
            if sums is not None:
                sums.add_chunk(slice(start, stop), logits, chunk, projection, only=count <= size)
    return losses


def _differentiate(
    job: Job,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    row_weight: float,
    wanted: Wanted,
) -> tuple[torch.Tensor, Gradients]:
    sums = GradientSums(job, hidden, weight, bias, wanted)
    losses = _sweep(job, hidden, weight, bias, row_weight=row_weight, sums=sums)
    # Converting the sums allocates again: only now, when the chunk's buffers are gone with the sweep.
    return losses, sums.result()


class _GradInForward(torch.autograd.Function):
    """Sum of the losses over the job's divisor; see NOTE [ Never [tokens, vocab] ]."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, job):
        wanted = Wanted(*ctx.needs_input_grad[:3])
        losses, gradients = _differentiate(job, hidden, weight, bias, row_weight=1.0 / job.divisor, wanted=wanted)
        # The node may hold the weight, which is a leaf: no graph that could hold the node hangs on it.
        ctx.owner = weight if job.accum == "main_grad" else None
        ctx.counts = job.labels.numel() > 0
        ctx.save_for_backward(*gradients)
        return losses.sum().div_(job.divisor)

    @staticmethod
    def backward(ctx, upstream):
        refuse_double_backward()
        gradients, ours = take_saved(ctx)
        if not ctx.counts:
            # The caller may have divided by the number of labels, 0, and 0 * inf is not 0.
            upstream = torch.zeros_like(upstream)
        if ctx.owner is not None and gradients[1] is not None:
            add_scaled(main_grad_of(ctx.owner), gradients[1], upstream)
            mark_added(ctx.owner)
            gradients[1] = None
        for i, saved in enumerate(gradients):
            if saved is not None:
                gradients[i] = saved.mul_(upstream) if ours else saved * upstream
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
    if reduction == "sum" and job.grad_mode != "recompute" and not rounds_to_float16(job.gemm_dtype, *inputs):
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
            return _GradInForward.apply(*inputs, job)
        return _sweep(job, *inputs).sum().div_(job.divisor)
    statistics = row_statistics(job, *inputs)
    losses = job.objective.combine(statistics)
    if reduction == "sum":
        return losses.sum() / job.divisor
    return losses if job.rows is None else losses.new_zeros(hidden.shape[0]).index_copy(0, job.rows, losses)
