"""Other people's losses under the semantics of ours.

An adapted loss is a function that sums the losses of rows that all count. Everything around it is done here, the same
for all: rows that do not count are dropped before, the divisor and the upstream gradient come after. Its gradients are
taken at once, with an upstream gradient of 1, and kept: how it treats another one, a second backward or a frozen tensor
is then nobody's trouble (of those in this folder one scales its saved gradients in place and returns wrong ones the
second time, two cannot be called twice, one gives a weight no gradient when hidden is frozen).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ac_loss._job import Job
from ac_loss.backends.torch_backend.guards import autocast_off, refuse_double_backward, take_saved

if TYPE_CHECKING:
    from ac_loss.backends.request import Request

Total = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
"""Sum of the losses of hidden ``[n, H]``, weight ``[V, H]``, bias ``[V]`` or None, all of one dtype, labels ``[n]``."""


def run(total: Total, job: Job, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The sum of the losses over the job's divisor, a scalar; at least one row counts."""
    inputs = (hidden, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        return _GradInForward.apply(*inputs, job, total)
    with autocast_off(hidden.device.type):
        return total(*_operands(job, *inputs), job.labels).to(job.loss_dtype) / job.divisor


def _operands(
    job: Job, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> list[torch.Tensor | None]:
    rows = hidden if job.rows is None else hidden.index_select(0, job.rows)
    return [None if t is None else t.to(job.gemm_dtype) for t in (rows, weight, bias)]


class _GradInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, job, total):  # noqa: PLR0917 - autograd functions take no keywords
        wanted = ctx.needs_input_grad[:3]
        leaves = [None if t is None else t.detach() for t in _operands(job, hidden, weight, bias)]
        # Hidden always: some compute the weight's gradient only along with it.
        for leaf, needed in zip(leaves, (True, *wanted[1:]), strict=True):
            if leaf is not None:
                leaf.requires_grad_(needed)
        with torch.enable_grad(), autocast_off(hidden.device.type):
            loss = total(*leaves, job.labels)
            asked = [leaf for leaf, needed in zip(leaves, wanted, strict=True) if needed]
            found = iter(torch.autograd.grad(loss, asked))
        of_hidden, of_weight, of_bias = (next(found) if needed else None for needed in wanted)
        if of_hidden is not None and job.rows is not None:
            of_hidden = torch.zeros_like(hidden).index_copy_(0, job.rows, of_hidden.to(hidden.dtype))
        gradients = zip((of_hidden, of_weight, of_bias), (hidden, weight, bias), strict=True)
        ctx.save_for_backward(*(None if g is None else g.to(t.dtype) for g, t in gradients))
        ctx.divisor = job.divisor
        return loss.detach().to(job.loss_dtype) / job.divisor

    @staticmethod
    def backward(ctx, upstream):
        refuse_double_backward()
        factor = upstream / ctx.divisor
        gradients, ours = take_saved(ctx)
        for i, saved in enumerate(gradients):
            if saved is not None:
                gradients[i] = saved.mul_(factor) if ours else saved * factor
        return *gradients, None, None


def objections(request: "Request") -> list[str]:
    """What none of the adapted losses can do, or does here."""
    found = []
    if request.reduction == "none":
        found.append("only sums and means are adapted, not reduction 'none': use 'torch' or 'triton'")
    if request.objective.logit_scale != 1.0:
        found.append("it has no logit_scale: multiply hidden by it where there is no bias, or use 'torch' or 'triton'")
    if request.rounds_to_float16:
        found.append(
            "it rounds gradients to float16 before the backward brings the loss scale, and most would be lost: "
            "use 'torch' or 'triton', or bfloat16"
        )
    if request.accum == "main_grad":
        found.append("accum 'main_grad' is not adapted: use accum='fp32', or 'torch' or 'triton'")
    if request.grad_mode == "recompute":
        found.append("its gradients are taken in the forward: use grad_mode='auto', or 'torch' or 'triton'")
    return found


def extra_bytes(request: "Request", own: int) -> int:
    """Bytes beyond inputs and returned gradients, of which the adapted loss itself holds ``own``."""
    width, item = request.hidden_size, request.gemm_dtype.itemsize
    copies = request.label_bytes
    if request.counted < request.tokens or request.hidden_dtype != request.gemm_dtype:
        copies += request.counted * width * item
    if request.weight_dtype != request.gemm_dtype:
        copies += request.vocab * width * item
    return copies + own


def gradient_bytes(request: "Request") -> int:
    """Of the gradients of the operands, hidden's always among them."""
    if not request.differentiated:
        return 0
    rows = request.counted + request.vocab * request.grad_weight
    return (rows * request.hidden_size + request.vocab * request.grad_bias) * request.gemm_dtype.itemsize
