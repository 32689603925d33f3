"""Calls of the kernels with torch tensors, and the products that torch has no single name for."""

from typing import NamedTuple

import torch

from ac_loss._objective import Objective
from ac_loss.backends.torch_backend import RowStatistics
from ac_loss.backends.triton_backend import interpreted, kernels, layout


class Operands(NamedTuple):
    """What makes the logits: ``[n, H]``, ``[V, H]`` of one dtype, ``[V]`` or None, ``[n]`` int64; any strides."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    labels: torch.Tensor

    def rows(self, rows: slice) -> "Operands":
        return self._replace(hidden=self.hidden[rows], labels=self.labels[rows])


def statistics(operands: Operands, objective: Objective) -> RowStatistics:
    """Statistics of each row, ``[n]`` fp32, without its logits."""
    count, vocab = operands.labels.numel(), operands.weight.shape[0]
    parts, tiles = layout.splits(count, vocab)
    new = operands.hidden.new_empty
    tops, totals = (new((parts, count), dtype=torch.float32) for _ in range(2))
    sums = new((parts, count), dtype=torch.float32) if objective.label_smoothing else None
    hits = new(count, dtype=torch.float32)
    grid = (-(-count // layout.BLOCK_ROWS), parts)
    with torch.cuda.device_of(hits):
        kernels.softmax_statistics[grid](
            *operands,
            tops,
            totals,
            sums,
            hits,
            count,
            vocab,
            tiles,
            HAS_SUMS=sums is not None,
            **_common(operands, objective),
        )

    # As everywhere, relative to the row's largest logit.
    top = tops.amax(0)
    shift = tops - top
    mean = None
    if sums is not None:
        edges = torch.arange(parts + 1, device=top.device).mul_(tiles * layout.BLOCK_COLUMNS).clamp_(max=vocab)
        mean = (sums + shift * edges.diff().unsqueeze(1)).sum(0) / vocab
    log_total = totals.mul_(shift.exp_()).sum(0).log_()
    return RowStatistics(top=top, log_total=log_total, label=hits.sub_(top), mean=mean, argmax=None)


class Factors(NamedTuple):
    """What the gradient of a row of logits is made of, ``[n]`` fp32: ``exp(s - top) * scale - pull * share``."""

    top: torch.Tensor
    scale: torch.Tensor
    pull: torch.Tensor

    @classmethod
    def of(cls, top: torch.Tensor, log_total: torch.Tensor, objective: Objective, upstream: torch.Tensor) -> "Factors":
        """Of the gradient of ``sum(upstream * losses)`` in ``W h``, but for the softcap's slope."""
        pull = upstream.float() * objective.logit_scale
        scale = pull * (-log_total).exp_()
        if objective.z_loss:
            scale.mul_((log_total + top).mul_(2.0 * objective.z_loss).add_(1.0))
        return cls(top, scale, pull)

    def rows(self, rows: slice) -> "Factors":
        return Factors(*(part[rows] for part in self))


def logit_gradients_(
    out: torch.Tensor, operands: Operands, objective: Objective, factors: Factors, columns: slice
) -> torch.Tensor:
    """Write the gradient in the logits of the classes ``columns`` to ``out [n, classes]``, contiguous along classes."""
    count, width = operands.labels.numel(), columns.stop - columns.start
    smoothing = objective.label_smoothing
    programs = -(-count // layout.BLOCK_ROWS) * -(-width // layout.BLOCK_COLUMNS)
    with torch.cuda.device_of(out):
        kernels.logit_gradients[(programs,)](
            *operands,
            *factors,
            out,
            count,
            columns.start,
            columns.stop,
            out_row_stride=out.stride(0),
            label_share=1.0 - smoothing,
            other_share=smoothing / operands.weight.shape[0],
            GROUP=layout.GROUP,
            **_common(operands, objective),
        )
    return out


def _common(operands: Operands, objective: Objective) -> dict[str, object]:
    hidden, weight, bias, _ = operands
    width = hidden.shape[1]
    block = layout.block_width(width, hidden.element_size())
    return {
        "hidden_size": width,
        "hidden_row_stride": hidden.stride(0),
        "hidden_stride": hidden.stride(1),
        "weight_row_stride": weight.stride(0),
        "weight_stride": weight.stride(1),
        "bias_stride": 0 if bias is None else bias.stride(0),
        "logit_scale": objective.logit_scale,
        "softcap": objective.softcap or 1.0,
        "HAS_BIAS": bias is not None,
        "HAS_SOFTCAP": objective.softcap is not None,
        "EVEN": width % block == 0,
        # The interpreter's product of bf16 tiles is garbage (triton 3.9).
        "UPCAST": interpreted(),
        "BLOCK_ROWS": layout.BLOCK_ROWS,
        "BLOCK_COLUMNS": layout.BLOCK_COLUMNS,
        "BLOCK_WIDTH": block,
        "num_warps": layout.WARPS,
        "num_stages": layout.STAGES,
    }


def write_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``out = a @ b``, summed and rounded to the dtype of ``out`` once."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif out.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def add_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``out += a @ b``, in the dtype of ``out``."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif out.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))
