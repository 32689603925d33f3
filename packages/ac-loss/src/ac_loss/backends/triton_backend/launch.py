"""Calls of the kernels with torch tensors, and the products that torch has no single name for."""

from typing import NamedTuple

import torch

from ac_loss._objective import Objective
from ac_loss.backends.triton_backend import interpreted, kernels, layout


class Operands(NamedTuple):
    """What makes the logits: ``[n, H]``, ``[V, H]`` of one dtype, ``[V]`` or None, ``[n]`` int64; any strides."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    labels: torch.Tensor

    def rows(self, rows: slice) -> "Operands":
        return self._replace(hidden=self.hidden[rows], labels=self.labels[rows])


class Statistics(NamedTuple):
    """Of each row's logits, ``[n]`` fp32: the largest, and the sum of ``exp(logit - largest)``."""

    top: torch.Tensor
    total: torch.Tensor

    def lse(self) -> torch.Tensor:
        return self.top + self.total.log()


def losses(operands: Operands, objective: Objective) -> tuple[torch.Tensor, Statistics]:
    """Loss of each row, ``[n]`` fp32, and what the backward needs to make its logits' probabilities again."""
    count, vocab = operands.labels.numel(), operands.weight.shape[0]
    parts, tiles = layout.splits(count, vocab)
    new = operands.hidden.new_empty
    tops, totals = (new((parts, count), dtype=torch.float32) for _ in range(2))
    sums = new((parts, count), dtype=torch.float32) if objective.label_smoothing else None
    hits = new(count, dtype=torch.float32)
    grid = (-(-count // layout.BLOCK_ROWS), parts)
    with torch.cuda.device_of(operands.hidden):
        kernels.softmax_statistics[grid](
            *operands, tops, totals, sums, hits, count, vocab, tiles, **_common(operands, objective), HAS_SUMS=sums is not None
        )

    # Relative to the largest logit, as in Objective: the difference of absolute values loses the loss to an offset.
    top = tops.amax(0)
    total = (totals * (tops - top).exp_()).sum(0)
    log_total = total.log()
    result = (top - hits).mul_(1.0 - objective.label_smoothing).add_(log_total)
    if sums is not None:
        bounds = torch.arange(parts + 1, device=top.device).mul_(tiles * layout.BLOCK_COLUMNS).clamp_(max=vocab)
        shifted = (sums + (tops - top) * bounds.diff().unsqueeze(1)).sum(0)
        result.sub_(shifted, alpha=objective.label_smoothing / vocab)
    if objective.z_loss:
        result.add_((log_total + top).square_(), alpha=objective.z_loss)
    return result, Statistics(top, total)


class GradientRows(NamedTuple):
    """Factors of each row's logit gradient, ``[n]`` fp32; see :func:`gradient_rows`."""

    top: torch.Tensor
    scale: torch.Tensor
    pull: torch.Tensor

    def rows(self, rows: slice) -> "GradientRows":
        return GradientRows(*(part[rows] for part in self))


def gradient_rows(statistics: Statistics, objective: Objective, upstream: torch.Tensor) -> GradientRows:
    """What is common to a row of the gradient of ``sum(upstream * losses)`` in ``W h``."""
    pull = upstream.float() * objective.logit_scale
    scale = pull / statistics.total
    if objective.z_loss:
        scale = scale * (1.0 + 2.0 * objective.z_loss * statistics.lse())
    return GradientRows(statistics.top, scale.contiguous(), pull.contiguous())


def logit_gradients_(
    out: torch.Tensor, operands: Operands, objective: Objective, rows: GradientRows, columns: slice
) -> torch.Tensor:
    """Write the gradient in the logits of the classes ``columns`` to ``out [n, classes]``, contiguous along classes."""
    count, width = operands.labels.numel(), columns.stop - columns.start
    smoothing = objective.label_smoothing
    programs = -(-count // layout.BLOCK_ROWS) * -(-width // layout.BLOCK_COLUMNS)
    with torch.cuda.device_of(out):
        kernels.logit_gradients[(programs,)](
            *operands,
            *rows,
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
