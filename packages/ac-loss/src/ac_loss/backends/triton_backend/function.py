"""The ``triton`` backend's losses as an autograd function."""

import torch

from ac_loss._job import Job
from ac_loss._main_grad import main_grad_of, mark_added
from ac_loss.backends.torch_backend.guards import autocast_off, refuse_double_backward
from ac_loss.backends.triton_backend.gradients import differentiate
from ac_loss.backends.triton_backend.launch import Factors, Operands, statistics
from ac_loss.backends.triton_backend.layout import Plan


def _operands(job: Job, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Operands:
    """Of the rows that count, in the dtype of the products; copies only where something is dropped or converted."""
    rows = hidden if job.rows is None else hidden.index_select(0, job.rows)
    return Operands(rows.to(job.gemm_dtype), weight.to(job.gemm_dtype), bias, job.labels)


class RowLosses(torch.autograd.Function):
    """Losses ``[n]`` of the rows that count. The backward takes a gradient for each and makes the logits again."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, job):
        found = statistics(_operands(job, hidden, weight, bias), job.objective)
        ctx.save_for_backward(hidden, weight, bias, found.top, found.log_total)
        ctx.job = job
        # The node may hold the weight, which is a leaf: no graph that could hold the node hangs on it.
        ctx.owner = weight if job.accum == "main_grad" else None
        return job.objective.combine(found)

    @staticmethod
    def backward(ctx, upstream):
        refuse_double_backward()
        job, owner = ctx.job, ctx.owner
        hidden, weight, bias, top, log_total = ctx.saved_tensors
        grad_hidden, grad_weight, grad_bias = ctx.needs_input_grad[:3]
        into = main_grad_of(owner) if owner is not None and grad_weight else None
        plan = Plan.make(
            tokens=job.labels.numel(),
            vocab=weight.shape[0],
            hidden_size=weight.shape[1],
            weight_itemsize=weight.element_size(),
            grad_hidden=grad_hidden,
            grad_weight=grad_weight,
            elsewhere=into is not None,
        )
        with autocast_off(hidden.device.type):
            of_hidden, of_weight, of_bias = differentiate(
                _operands(job, hidden, weight, bias),
                job.objective,
                Factors.of(top, log_total, job.objective, upstream),
                plan,
                hidden=hidden if grad_hidden else None,
                index=job.rows,
                weight_dtype=weight.dtype if grad_weight and into is None else None,
                into=into,
                grad_bias=grad_bias,
            )
        if into is not None:
            mark_added(owner)
        return of_hidden, of_weight, None if of_bias is None else of_bias.to(bias.dtype), None
