"""Gradients of hidden, weight and bias from blocks of logit gradients.

NOTE [ The unfilled gradient is the memory ]
At real sizes the gradients of weight and hidden are nearly all that a loss without logits has to hold, and the goal is
5 % more. Logits are made twice, in the forward for their softmax and here for their gradient, a block of all rows by a
few thousand classes at a time. Each block gives its classes' weight gradient in one product over all rows, complete and
rounded once, so no fp32 copy of the weight's gradient is needed. Hidden's gradient is a sum over blocks, which bf16
would spoil, and its fp32 sum would be twice the gradient. That sum lies in the part of the weight gradient's storage
that is filled last: ``2 * tokens`` of its rows where it is bf16. When all classes have been added, hidden's gradient is
rounded out of there, and the logit gradients of those last classes are made once more for their weight gradient.

In all 4 products of ``2 * tokens * vocab * hidden_size`` FLOPs, and ``2 * tokens / vocab`` of one. The two that need no
softmax are cuBLAS's. (Three are enough where all logits of some rows are held at once; then the weight gradient is a
sum over rows, in an fp32 copy, or rounded often: that is the ``torch`` backend. One kernel for everything would need
atomics or locks to add a tile's share to both gradients, which bf16 spoils as well.)
"""

import torch

from ac_loss._objective import Objective
from ac_loss.backends.triton_backend.launch import (
    Factors,
    Operands,
    add_product,
    logit_gradients_,
    write_product,
)
from ac_loss.backends.triton_backend.layout import ROWS_WITHOUT_WEIGHT, Plan, spans


def differentiate(
    operands: Operands,
    objective: Objective,
    factors: Factors,
    plan: Plan,
    *,
    hidden: torch.Tensor | None,
    index: torch.Tensor | None,
    weight_dtype: torch.dtype | None,
    into: torch.Tensor | None,
    grad_bias: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of hidden ``[N, H]``, weight ``[V, H]`` and bias ``[V]`` (fp32); None where not wanted.

    Args:
        operands: the rows that count.
        objective: what is minimised.
        factors: of the rows that count.
        plan: the order of work.
        hidden: the caller's ``[N, H]``, for the shape and dtype of its gradient; None if that is not wanted.
        index: which rows of ``hidden`` count; None if all do.
        weight_dtype: of the weight's gradient: the operands' or fp32; None if it is not to be returned.
        into: ``[V, H]`` fp32, what the weight's gradient is added to instead; None for nowhere.
        grad_bias: whether the bias's gradient is wanted.
    """
    width = operands.hidden.shape[1]
    new = operands.hidden.new_empty
    weight_grad = None if weight_dtype is None else new((plan.vocab, width), dtype=weight_dtype)
    bias_grad = operands.hidden.new_zeros(plan.vocab, dtype=torch.float32) if grad_bias else None
    hidden_grad, total = None, None
    if hidden is not None:
        total = _borrow(weight_grad, plan) if plan.borrows else new((plan.rows, width), dtype=torch.float32)
    scratch = new((plan.rows, plan.columns))

    for rows in spans(0, plan.tokens, plan.rows):
        part, part_factors = operands.rows(rows), factors.rows(rows)
        count = rows.stop - rows.start
        for columns in spans(0, plan.vocab, plan.columns):
            block = scratch[:count, : columns.stop - columns.start]
            logit_gradients_(block, part, objective, part_factors, columns)
            if bias_grad is not None:
                bias_grad[columns] += block.sum(0, dtype=torch.float32)
            if weight_grad is not None and columns.stop <= plan.kept:
                write_product(weight_grad[columns], block.t(), part.hidden)
            if into is not None:
                add_product(into[columns], block.t(), part.hidden)
            if total is not None:
                put = add_product if columns.start else write_product
                put(total[:count], block, operands.weight[columns])
        if hidden is not None:
            if hidden_grad is None:
                # Not before now: while the sum is in the weight gradient's storage, this is not needed yet. Only rows
                # that count are written.
                hidden_grad = torch.empty_like(hidden) if index is None else torch.zeros_like(hidden)
            _place(hidden_grad, total, rows, index)

    if weight_grad is not None:
        for columns in spans(plan.kept, plan.vocab, plan.columns):
            block = scratch[:, : columns.stop - columns.start]
            logit_gradients_(block, operands, objective, factors, columns)
            write_product(weight_grad[columns], block.t(), operands.hidden)
    return hidden_grad, weight_grad, bias_grad


def _borrow(weight_grad: torch.Tensor, plan: Plan) -> torch.Tensor:
    """An fp32 ``[tokens, H]`` in the storage of the classes from ``plan.kept`` on."""
    width = weight_grad.shape[1]
    elements = plan.tokens * width * 4 // weight_grad.element_size()
    return weight_grad[plan.kept :].view(-1)[:elements].view(torch.float32).view(plan.tokens, width)


def _place(hidden_grad: torch.Tensor, total: torch.Tensor, rows: slice, index: torch.Tensor | None) -> None:
    """Round ``total`` into the rows of ``hidden_grad`` that it belongs to."""
    if index is None:
        hidden_grad[rows] = total[: rows.stop - rows.start]
        return
    for part in spans(rows.start, rows.stop, ROWS_WITHOUT_WEIGHT):
        source = total[part.start - rows.start : part.stop - rows.start]
        hidden_grad.index_copy_(0, index[part], source.to(hidden_grad.dtype))
