"""Statistics of each row of logits, differentiable, by tiles of tokens and classes.

NOTE [ Tiles ]
The forward keeps a running maximum and a running sum of exponentials for each row (online softmax, arXiv:1805.02867),
so no row of logits is ever whole. With these known, the gradient of a tile's logits needs no other tile: the backward
computes the logits again, all tokens of a few thousand classes at a time, and finishes the weight gradient of those
classes, which is why none is summed over chunks here, in any dtype. Only the gradient of hidden is summed over tiles.
Four GEMMs instead of three; between forward and backward the inputs and two numbers a row are all that is kept.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ac_loss._job import Job
from ac_loss._main_grad import main_grad_of, mark_added
from ac_loss.backends.torch_backend.gradients import Gradients, Wanted, WeightGradient
from ac_loss.backends.torch_backend.guards import autocast_off, refuse_double_backward
from ac_loss.backends.torch_backend.tiles import Tiles


class RowStatistics(NamedTuple):
    """Of each row ``s`` of logits, scaled and capped, with label ``y``; ``[n]`` in the dtype of the losses.

    All are relative to the row's maximum, for differences of absolute values lose everything when all logits share a
    large offset. Gradients are those of the absolute values: where ``top`` is added, it counts as a constant.

    Attributes:
        top: ``max(s)``; no gradient.
        log_total: ``logsumexp(s) - top``.
        label: ``s[y] - top``.
        mean: ``mean(s) - top``; None unless the objective smooths labels.
        argmax: int64, the first of equals, no gradient; None unless asked for.
    """

    top: torch.Tensor
    log_total: torch.Tensor
    label: torch.Tensor
    mean: torch.Tensor | None
    argmax: torch.Tensor | None


def row_statistics(
    job: Job, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, argmax: bool = False
) -> RowStatistics:
    """Statistics of the rows that count.

    Args:
        job: what to compute; its objective says how logits are scaled and capped. Its divisor plays no part.
        hidden: ``[N, H]``.
        weight: ``[V, H]``.
        bias: ``[V]`` or None.
        argmax: whether it is wanted; not of a sharded vocabulary.
    """
    return RowStatistics(*_RowStatistics.apply(hidden, weight, bias, job, argmax))


class _RowStatistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, job, argmax):  # noqa: PLR0917 - autograd functions take no keywords
        with autocast_off(hidden.device.type):
            tiles = Tiles(job, hidden, weight, bias)
            parts = [_summarise(tiles, rows, argmax=argmax) for rows in tiles.rows()]
        columns = zip(*parts, strict=True)
        statistics = RowStatistics(*(None if column[0] is None else torch.cat(column) for column in columns))
        if job.vocabulary is not None:
            statistics = _over_all_ranks(statistics, job)
        ctx.job = job
        # The node may hold the weight, which is a leaf: no graph that could hold the node hangs on it.
        ctx.owner = weight if job.accum == "main_grad" else None
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(statistics.top, *([] if statistics.argmax is None else [statistics.argmax]))
        ctx.save_for_backward(hidden, weight, bias, statistics.top, statistics.log_total)
        return tuple(statistics)

    @staticmethod
    def backward(ctx, _top, log_total, label, mean, _argmax):
        refuse_double_backward()
        hidden, weight, bias, *saved = ctx.saved_tensors
        wanted = Wanted(*ctx.needs_input_grad[:3])
        vocab = len(weight) if ctx.job.vocabulary is None else ctx.job.vocabulary.size
        upstream = _Upstream.of(ctx.job, vocab, *saved, (log_total, label, mean))
        into = main_grad_of(ctx.owner) if ctx.owner is not None and wanted.weight else None
        with autocast_off(hidden.device.type):
            gradients = _differentiate(Tiles(ctx.job, hidden, weight, bias), upstream, wanted, into)
        if into is not None:
            mark_added(ctx.owner)
        return *gradients, None, None


def _summarise(tiles: Tiles, rows: slice, *, argmax: bool) -> RowStatistics:
    """One pass over the vocabulary for some rows."""
    chunk, job = tiles.chunk(rows), tiles.job
    # The least finite number, not -inf: a tile may hold nothing but -inf, and inf - inf is NaN.
    lowest = torch.finfo(job.loss_dtype).min
    top = chunk.new_full((len(chunk), 1), lowest, dtype=job.loss_dtype)
    total, label = torch.zeros_like(top), torch.zeros_like(top)
    mean = torch.zeros_like(top) if job.objective.label_smoothing else None
    best, at = (torch.full_like(top, -math.inf), torch.zeros_like(top, dtype=torch.int64)) if argmax else (None, None)
    for classes in tiles.classes():
        tile, _ = tiles.logits(chunk, tiles.matrix(classes), classes, slope=False)
        column, inside = tiles.positions(rows, classes)
        label = torch.where(inside, tile.gather(1, column), label)
        if best is None:
            highest = tile.amax(1, keepdim=True)
        else:
            highest, where = tile.max(1, keepdim=True)
            # As in torch.argmax: the first of equals, and NaN above all.
            at = torch.where((highest > best) | (highest.isnan() & ~best.isnan()), where + classes.start, at)
            best = torch.maximum(best, highest)
        shift = torch.maximum(top, highest)
        tile.sub_(shift)
        if mean is not None:
            mean.add_(tile.sum(1, keepdim=True), alpha=1 / tiles.vocab)
            if classes.start:
                mean.add_(top - shift, alpha=classes.start / tiles.vocab)
        total.mul_((top - shift).exp_()).add_(tile.exp_().sum(1, keepdim=True))
        top = shift
    statistics = RowStatistics(top, total.log_(), label.sub_(top), mean, at)
    return RowStatistics(*(None if tensor is None else tensor.squeeze(1) for tensor in statistics))


def _over_all_ranks(here: RowStatistics, job: Job) -> RowStatistics:
    """The statistics of whole rows, from those of this rank's classes; see NOTE [ Two all-reduces a chunk ]."""
    shard, top = job.vocabulary, here.top.clone()
    shard.max_(top)
    shift = here.top - top
    total = here.log_total.add(shift).exp_()
    label = here.label.add(shift).masked_fill_(shard.locate(job.labels)[1].squeeze(1), 0.0)
    mean = None if here.mean is None else here.mean.add(shift).mul_(shard.width / shard.size)
    shard.sum_(total, label, mean)
    return RowStatistics(top, total.log_(), label, mean, None)


class _Upstream(NamedTuple):
    """What the gradient of a row of ``W h`` is made of, but for the slope; all ``[n, 1]`` in the dtype of the losses.

    ``softmax * exp(s - top) + label * (class == y) + mean``, each with the logit scale in it.
    """

    top: torch.Tensor
    softmax: torch.Tensor
    label: torch.Tensor
    mean: torch.Tensor | None

    @classmethod
    def of(
        cls, job: Job, vocab: int, top: torch.Tensor, log_total: torch.Tensor, given: Sequence[torch.Tensor | None]
    ) -> "_Upstream":
        """From the gradients of ``log_total``, ``label`` and ``mean``; None for a gradient that is 0."""
        scale = job.objective.logit_scale
        softmax, label, mean = (None if gradient is None else gradient * scale for gradient in given)
        softmax = torch.zeros_like(top) if softmax is None else softmax * (-log_total).exp_()
        label = torch.zeros_like(top) if label is None else label
        mean = None if mean is None else (mean / vocab).unsqueeze(1)
        return cls(top.unsqueeze(1), softmax.unsqueeze(1), label.unsqueeze(1), mean)

    def write_(self, tile: torch.Tensor, rows: slice, column: torch.Tensor, inside: torch.Tensor) -> None:
        """Turn a tile of ``s`` into this, in place."""
        tile.sub_(self.top[rows]).exp_().mul_(self.softmax[rows])
        hit = tile.gather(1, column).add_(torch.where(inside, self.label[rows], 0.0))
        tile.scatter_(1, column, hit)
        if self.mean is not None:
            tile.add_(self.mean[rows])


def _differentiate(tiles: Tiles, upstream: _Upstream, wanted: Wanted, into: torch.Tensor | None) -> Gradients:
    """The logits again, and the gradients; that of the weight is added to ``into`` where it is given."""
    job, hidden, weight, bias = tiles.job, tiles.hidden, tiles.weight, tiles.bias
    grad_hidden = grad_weight = grad_bias = None
    if wanted.hidden:
        grad_hidden = hidden.new_zeros(tiles.tokens, hidden.shape[1], dtype=job.loss_dtype)
    if wanted.weight and into is None:
        grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if wanted.bias and bias is not None:
        grad_bias = weight.new_zeros(tiles.vocab, dtype=job.loss_dtype)
    for classes in tiles.classes():
        matrix = tiles.matrix(classes)
        block = WeightGradient(weight[classes], job, None if into is None else into[classes])
        for rows in tiles.rows():
            chunk = tiles.chunk(rows)
            tile, slope = tiles.logits(chunk, matrix, classes, slope=True)
            upstream.write_(tile, rows, *tiles.positions(rows, classes))
            if slope is not None:
                tile.mul_(slope)
                del slope  # as large as the tile, and the next one is made before this name is taken again
            if grad_bias is not None:
                grad_bias[classes].add_(tile.sum(0))
            grad_logits = tiles.narrowed(tile)
            if grad_hidden is not None:
                matrix.add_gradient(grad_logits, grad_hidden[rows])
            if wanted.weight:
                block.add(grad_logits, chunk, only=len(chunk) == tiles.tokens)
        if grad_weight is not None:
            grad_weight[classes] = block.result()
        del matrix, block  # the next ones are made before these names are taken again
    if grad_hidden is not None:
        grad_hidden = grad_hidden.to(hidden.dtype)
        if job.rows is not None:
            grad_hidden = torch.zeros_like(hidden).index_copy_(0, job.rows, grad_hidden)
    return Gradients(grad_hidden, grad_weight, None if grad_bias is None else grad_bias.to(bias.dtype))
