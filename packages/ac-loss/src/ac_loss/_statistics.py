"""What is often wanted of the logits besides a loss, without the logits."""

from typing import Literal, NamedTuple

import torch

from ac_loss._job import Job
from ac_loss._objective import Objective
from ac_loss._validation import Rows, autocast_dtype, check_tensors, select_rows
from ac_loss.backends.torch_backend import row_statistics
from ac_loss.config import check_choice, check_integer, check_number


class TokenStatistics(NamedTuple):
    """For each token, in the shape of the labels; all but ``argmax`` and ``correct`` fp32, or fp64 for fp64 inputs.

    Attributes:
        log_probs: log-probability of the label, 0 where it is ignored; differentiable. None without labels.
        logsumexp: of the logits, 0 where the label is ignored; differentiable.
        argmax: int64, the class with the largest logit, the first of equals; -1 where the label is ignored.
        correct: bool, whether ``argmax`` is the label; False where it is ignored. None without labels.
    """

    log_probs: torch.Tensor | None
    logsumexp: torch.Tensor
    argmax: torch.Tensor
    correct: torch.Tensor | None

    @property
    def accuracy(self) -> torch.Tensor:
        """Scalar fp32: the share of ``correct`` among the tokens that count, 0 if none does."""
        if self.correct is None:
            raise ValueError("accuracy: needs labels, and the statistics were computed without; pass labels")
        return self.correct.sum() / (self.argmax >= 0).sum().clamp(min=1)


def token_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    backend: Literal["auto", "torch"] = "auto",
) -> TokenStatistics:
    """Log-probabilities, log-sum-exps and most likely classes of ``logit_scale * (hidden @ weight.T + bias)``, capped.

    ``[tokens, vocab]`` is never allocated. ``log_probs`` and ``logsumexp`` may both enter what is differentiated, with
    any gradient for each token; the backward computes the logits again. Only first derivatives exist.

    Args:
        hidden: ``[..., hidden_size]``.
        weight: ``[vocab, hidden_size]``, dtype of ``hidden`` (any under ``torch.autocast``).
        labels: ``[...]``, integers in ``[0, vocab)`` or ``ignore_index``, already shifted. None for the statistics of
            every token that need no label: ``logsumexp`` and ``argmax``.
        bias: ``[vocab]``.
        ignore_index: label of the tokens that do not count; they are dropped before any work.
        softcap: ``c`` of ``c * tanh(logits / c)``, None for none.
        logit_scale: positive number that multiplies the logits, before the softcap.
        backend: ``"torch"``, or ``"auto"``, which is ``"torch"``: the others compute no statistics.

    Raises:
        IndexError: a label is neither in range nor ``ignore_index``.
        TypeError: a tensor argument is not a tensor.
        ValueError: an option, shape, dtype or device is wrong; names it, the constraint and the remedy.
    """
    check_choice("backend", backend, ("auto", "torch"))
    check_integer("ignore_index", ignore_index)
    if softcap is not None:
        check_number("softcap", softcap, above_zero=True)
    check_number("logit_scale", logit_scale, above_zero=True)
    objective = Objective(logit_scale=logit_scale, softcap=softcap)
    compute_here = compute
    if torch.compiler.is_compiling():
        from ac_loss._uncompiled import compute_statistics as compute_here
    return compute_here(hidden, weight, labels, bias, objective=objective, ignore_index=ignore_index)


def compute(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    objective: Objective,
    ignore_index: int,
) -> TokenStatistics:
    """:func:`token_statistics` once its options are checked."""
    autocast = autocast_dtype(hidden)
    check_tensors(hidden, weight, labels, bias, autocast)
    shape = hidden.shape[:-1]
    flat = hidden.reshape(shape.numel(), weight.shape[1])
    if labels is None:
        # Any class will do: what is said of it is not returned.
        rows = Rows(torch.zeros(len(flat), dtype=torch.int64, device=hidden.device), None, None)
    else:
        rows = select_rows(labels, ignore_index, weight.shape[0], None)
    job = Job(
        objective=objective,
        gemm_dtype=autocast or hidden.dtype,
        accum="fp32",
        grad_mode="recompute",
        labels=rows.labels,
        rows=rows.index,
    )
    found = row_statistics(job, flat, weight, bias, argmax=True)

    def everywhere(values: torch.Tensor, elsewhere: float) -> torch.Tensor:
        if rows.index is not None:
            values = values.new_full((len(flat),), elsewhere).index_copy(0, rows.index, values)
        return values.reshape(shape)

    return TokenStatistics(
        log_probs=None if labels is None else everywhere(found.label - found.log_total, 0),
        logsumexp=everywhere(found.log_total + found.top, 0),
        argmax=everywhere(found.argmax, -1),
        correct=None if labels is None else everywhere(found.argmax == rows.labels, False),
    )
