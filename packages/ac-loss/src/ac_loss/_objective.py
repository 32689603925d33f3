"""The loss of a few rows of logits, and its gradient written over them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ac_loss.backends.torch_backend.statistics import RowStatistics
    from ac_loss.sharded.vocabulary import VocabShard


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is minimised for one token with head output ``x = W h + b`` and label ``y``.

    With ``l = logit_scale * x`` and ``s = c * tanh(l / c)`` (``s = l`` uncapped), it is
    ``(1 - e) * (lse - s[y]) + e * (lse - mean(s)) + z * lse ** 2`` with ``lse = logsumexp(s)``: cross-entropy, label
    smoothing ``e`` as in ``torch.nn.functional.cross_entropy``, the z-loss of PaLM (arXiv:2204.02311, section 5).
    """

    logit_scale: float = 1.0
    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def transform_(self, x: torch.Tensor, bias: torch.Tensor | None, *, slope: bool) -> torch.Tensor | None:
        """Turn ``W h`` into ``s``, in place.

        Args:
            x: ``W h``, ``[rows, columns]``, fp32 or fp64. Overwritten.
            bias: ``[columns]`` in the dtype of ``x``, or None.
            slope: whether the derivative is wanted.

        Returns:
            ``ds / dl`` in the shape of ``x`` (the factor ``logit_scale`` of ``ds / dx`` is left to the caller); None
            where it is 1 throughout or not wanted.
        """
        if bias is not None:
            x.add_(bias)
        if self.softcap is None:
            if self.logit_scale != 1.0:
                x.mul_(self.logit_scale)
            return None
        x.mul_(self.logit_scale / self.softcap).tanh_()
        derivative = x.square().neg_().add_(1.0) if slope else None
        x.mul_(self.softcap)
        return derivative

    def evaluate_(
        self,
        x: torch.Tensor,
        labels: torch.Tensor,
        bias: torch.Tensor | None,
        weight: torch.Tensor | float | None,
        shard: "VocabShard | None" = None,
    ) -> torch.Tensor:
        """Per-row losses of ``x``; ``x`` is consumed, and holds the gradient afterwards when ``weight`` is given.

        Args:
            x: ``W h``, ``[rows, vocab]``, fp32 or fp64. Overwritten: the gradient is that of ``W h`` (and of the bias).
            labels: ``[rows]``, int64, all in ``[0, vocab)``.
            bias: ``[vocab]`` in the dtype of ``x``, or None.
            weight: factor of each row's gradient, ``[rows]`` in the dtype of ``x`` or one number; None for no gradient.
            shard: the part of the vocabulary that ``x`` and ``bias`` are of; labels are of the whole. None for all.

        Returns:
            ``[rows]`` in the dtype of ``x``.
        """
        index, elsewhere = (labels.unsqueeze(1), None) if shard is None else shard.locate(labels)
        vocab = x.shape[1] if shard is None else shard.size
        slope = self.transform_(x, bias, slope=weight is not None)

        # Everything below is relative to the row's maximum: lse - s[y] on absolute values loses the whole loss when
        # all logits share a large offset.
        top = x.amax(1, keepdim=True)
        if shard is not None:
            shard.max_(top)
        x.sub_(top)
        of_label = x.gather(1, index)
        of_all = x.sum(1, keepdim=True) if self.label_smoothing else None
        total = x.exp_().sum(1, keepdim=True)
        if shard is not None:
            shard.sum_(total, of_label.masked_fill_(elsewhere, 0.0), of_all)
        losses = of_label.mul_(self.label_smoothing - 1.0)
        if of_all is not None:
            losses.sub_(of_all, alpha=self.label_smoothing / vocab)
        log_total = total.log()
        losses.add_(log_total)
        lse = log_total.add_(top) if self.z_loss else None
        if lse is not None:
            losses.add_(lse.square(), alpha=self.z_loss)
        if weight is None:
            return losses.squeeze(1)

        # The chain rule's factor of the logit scale is common to a row, as its weight is.
        weight = weight * self.logit_scale
        if isinstance(weight, torch.Tensor):
            weight = weight.unsqueeze(1)
        scale = total.reciprocal_()
        if lse is not None:
            scale.mul_(lse.mul_(2.0 * self.z_loss).add_(1.0))
        x.mul_(scale.mul_(weight))
        probability = x.gather(1, index)
        hit = probability - weight * (1.0 - self.label_smoothing)
        x.scatter_(1, index, hit if elsewhere is None else torch.where(elsewhere, probability, hit))
        if self.label_smoothing:
            x.sub_(weight * (self.label_smoothing / vocab))
        if slope is not None:
            x.mul_(slope)
        return losses.squeeze(1)

    def combine(self, statistics: "RowStatistics") -> torch.Tensor:
        """The same losses ``[rows]`` from what is known of the rows, differentiable in torch's own way."""
        losses = statistics.log_total - statistics.label
        if self.label_smoothing:
            losses = losses + self.label_smoothing * (statistics.label - statistics.mean)
        if self.z_loss:
            losses = losses + self.z_loss * (statistics.log_total + statistics.top).square()
        return losses
