"""The ``triton`` backend's loss as an autograd function."""

import torch

from ac_loss._job import Job
from ac_loss.backends.derivative import autocast_off, refuse_double_backward
from ac_loss.backends.triton_backend.gradients import differentiate
from ac_loss.backends.triton_backend.launch import Operands, Statistics, gradient_rows, losses
from ac_loss.backends.triton_backend.layout import Plan


def _operands(job: Job, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Operands:
    """Of the rows that count, in the dtype of the products; copies where something is dropped or converted."""
    rows = hidden if job.rows is None else hidden.index_select(0, job.rows)
    return Operands(rows.to(job.gemm_dtype), weight.to(job.gemm_dtype), bias, job.labels)


class RowLosses(torch.autograd.Function):
    """Losses ``[n]`` of the rows that count. The backward takes a gradient for each and makes the logits again."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, job):
        result, statistics = losses(_operands(job, hidden, weight, bias), job.objective)
        ctx.save_for_backward(hidden, weight, bias, *statistics)
        ctx.job = job
        return result

    @staticmethod
    def backward(ctx, upstream):
        refuse_double_backward()
        hidden, weight, bias, *statistics = ctx.saved_tensors
        job = ctx.job
        grad_hidden, grad_weight, grad_bias = ctx.needs_input_grad[:3]
        plan = Plan.make(
            tokens=job.labels.numel(),
            vocab=weight.shape[0],
            hidden_size=weight.shape[1],
            weight_itemsize=weight.element_size(),
            grad_hidden=grad_hidden,
            grad_weight=grad_weight,
        )
        with autocast_off(hidden.device.type):
            of_hidden, of_weight, of_bias = differentiate(
                _operands(job, hidden, weight, bias),
                job.objective,
                gradient_rows(Statistics(*statistics), job.objective, upstream),
                plan,
                hidden=hidden if grad_hidden else None,
                index=job.rows,
                weight_dtype=weight.dtype if grad_weight else None,
                grad_bias=grad_bias,
            )
        return of_hidden, of_weight, None if of_bias is None else of_bias.to(bias.dtype), None
