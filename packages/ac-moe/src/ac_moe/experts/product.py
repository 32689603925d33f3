"""One matrix product per expert, over consecutive blocks of rows, in one kernel where torch has one."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ac_moe.cache.modes import answering, is_answered, without_dispatch_modes

# NOTE [ What torch's grouped GEMM asks for ]
#
# `F.grouped_mm` (torch 2.11 to 2.13) is `aten._grouped_mm`, with these limits:
#
# 1. float32, bfloat16, float16. Every stride but that of 1 is a multiple of 16 bytes, of the gradient too. `K` or `N`
#    that are no such multiple, and float64, are multiplied expert by expert (`_PerExpert`), bit for bit what `@` gives.
# 2. The gradient must be dense: `out.sum().backward()` sends an expanded one. A hook makes it so.
# 3. Rows beyond the last offset are memory that nobody wrote, in the output and in the gradient of the rows. They are
#    zeroed in both; their values in the input may be anything, also NaN.
# 4. It packs its three saved tensors before it multiplies, so that early stop, which ends a recompute in the last pack,
#    never runs a trailing down projection again. `_PerExpert` packs after it has multiplied, as any Function does.
# 5. Fake and meta tensors of other dtypes than bfloat16 are refused: these take `_PerExpert`, which multiplies nothing,
#    unless a dispatch mode answers in the place of torch.
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # bytes
_GROUPED_MM = torch.ops.aten._grouped_mm.default


@torch.compiler.disable(reason="offsets are read and gradients are hooked, which a graph cannot")
def grouped_mm(
    rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, *, padded: bool | None = None
) -> torch.Tensor:
    """`rows[offsets[e - 1]:offsets[e]] @ weight[e]` for each expert `e`, with gradients for rows and weight.

    Under autocast both are cast as for `@`. Gradients of the second order are an error where `_PerExpert` is used.

    Args:
        rows: `[R, K]`, floating; R may be 0.
        weight: `[E, K, N]`, dtype of `rows`. A transposed view of `[E, N, K]` is taken as it is.
        offsets: int32 `[E]`, on the same device: where each expert's block ends, `tokens_per_expert.cumsum(0).int()`.
            Blocks may be empty, and rows may be left over behind the last.
        padded: whether rows are left over. None: looked up, on a CPU; assumed on an accelerator, where looking would
            wait for the device. Give False there if you know, for it spares two passes over memory.

    Returns:
        `[R, N]`, dtype of `rows`; zero for rows that are left over.

    Raises:
        ValueError: a shape, dtype, device or offset does not fit, or on an accelerator `K` or `N` is no multiple of
            16 bytes.
    """
    return Product(rows, weight, offsets, padded)()


class Product:
    """A checked product, to be run in full or as its autograd node alone. Arguments as of `grouped_mm`."""

    def __init__(self, rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, padded: bool | None) -> None:
        _check(rows, weight, offsets)
        device = rows.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            rows, weight = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (rows, weight))
        if rows.dtype != weight.dtype:
            raise ValueError(f"weight: {weight.dtype}, rows: {rows.dtype}; they must be of one dtype")
        self.rows, self.weight, self.offsets = rows, weight, offsets
        self.per_expert = not _takes_kernel(rows, weight)
        self.ends = None
        if not _without_values(offsets) and (self.per_expert or device == "cpu"):
            self.ends = _known_offsets(offsets, rows.shape[0])
        if padded is None:
            padded = self.ends is None or self.ends[-1] < rows.shape[0]
        self.padded = padded and not self.per_expert and not _without_values(rows)

    def __call__(self, *, skip: bool = False, hide: bool = False) -> torch.Tensor:
        """The product.

        Args:
            skip: make the autograd node and pack what it saves, but multiply nothing: the result is a NaN of one
                element, expanded to the shape of the product.
            hide: keep it out of sight of dispatch modes; see NOTE [ Out of sight of dispatch modes ].
        """
        if hide or skip or self.padded:  # rows that are left over are zeroed in place, which a selective policy refuses
            with without_dispatch_modes():
                return self._run(skip)
        return self._run(skip)

    def _run(self, skip: bool) -> torch.Tensor:
        rows = _NoGradientBeyond.apply(self.rows, self.offsets) if self.padded else self.rows
        if self.per_expert:
            return _PerExpert.apply(rows, self.weight, self.ends, skip)
        with answering(_GROUPED_MM, _placeholder) if skip else contextlib.nullcontext():
            output = F.grouped_mm(_aligned(rows), _aligned(self.weight), offs=self.offsets)
        if self.padded and not skip:
            output.detach().masked_fill_(_beyond(output, self.offsets), 0)
        if output.requires_grad:
            output.register_hook(_aligned)
        return output


class _PerExpert(torch.autograd.Function):
    """See NOTE [ What torch's grouped GEMM asks for ]. Rows beyond the last block stay zero, as their gradient does."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, ends: list[int] | None, skip: bool) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.ends = ends
        if skip:
            return _placeholder(rows, weight)
        output = rows.new_zeros(rows.shape[0], weight.shape[-1])
        for expert, block in _blocks(ends):
            output[block] = rows[block] @ weight[expert]
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        rows, weight = ctx.saved_tensors
        for_rows = torch.zeros_like(rows) if ctx.needs_input_grad[0] else None
        for_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for expert, block in _blocks(ctx.ends):
            if for_rows is not None:
                for_rows[block] = grad[block] @ weight[expert].t()
            if for_weight is not None:
                for_weight[expert] = rows[block].t() @ grad[block]
        return for_rows, for_weight, None, None


class _NoGradientBeyond(torch.autograd.Function):
    """Rows as they are, whose gradient is zero beyond the last block, where torch writes none."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        ctx.offsets = offsets
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.masked_fill(_beyond(grad, ctx.offsets), 0), None


def _placeholder(rows: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """`[R, N]` in one element of memory, NaN."""
    return rows.new_full((1,), float("nan")).expand(rows.shape[0], weight.shape[-1])


def _beyond(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return (torch.arange(rows.shape[0], device=rows.device) >= offsets[-1])[:, None]


def _blocks(ends: list[int] | None) -> Iterator[tuple[int, slice]]:
    """Number and rows of each expert that has any; nothing for fake tensors."""
    for expert, (begin, end) in enumerate(itertools.pairwise([0, *(ends or ())])):
        if begin < end:
            yield expert, slice(begin, end)


def _known_offsets(offsets: torch.Tensor, rows: int) -> list[int]:
    ends = offsets.tolist()
    if any(begin > end for begin, end in itertools.pairwise([0, *ends, rows])):
        raise ValueError(f"offsets: {ends} do not rise from 0 to at most {rows}, the number of rows")
    return ends


def _without_values(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _takes_kernel(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    if rows.dtype not in _KERNEL_DTYPES:
        return False
    if _without_values(rows) and rows.dtype != torch.bfloat16 and not is_answered(_GROUPED_MM):
        return False
    unaligned = [size for size in weight.shape[1:] if size * rows.dtype.itemsize % _ALIGNMENT]
    if unaligned and rows.device.type not in ("cpu", "meta"):
        raise ValueError(
            f"weight: {list(weight.shape)}, but on {rows.device.type} a grouped GEMM of {rows.dtype} needs K and N to "
            f"be multiples of {_ALIGNMENT // rows.dtype.itemsize}; pad the experts' hidden or intermediate size"
        )
    return not unaligned


def _aligned(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix, or matrices, in a layout that the kernel takes; a copy only if it is not in one."""
    size, strides = matrix.dtype.itemsize, list(matrix.stride())
    unit = -2 if matrix.ndim == 3 and strides[-2] == 1 else -1
    aligned = strides.pop(unit) == 1 and all(stride and stride * size % _ALIGNMENT == 0 for stride in strides)
    if aligned and matrix.storage_offset() * size % _ALIGNMENT == 0:
        return matrix
    # Not `contiguous`, which leaves a dimension of one element or none its stride, whatever that is.
    return matrix.clone(memory_format=torch.contiguous_format)


def _check(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> None:
    if rows.ndim != 2 or not rows.is_floating_point():
        raise ValueError(f"rows: {rows.dtype} {list(rows.shape)} does not fit; expected floating [R, K]")
    if weight.ndim != 3 or not weight.is_floating_point() or not weight.shape[0] or weight.shape[1] != rows.shape[1]:
        raise ValueError(
            f"weight: {weight.dtype} {list(weight.shape)} does not fit; expected floating [E, {rows.shape[1]}, N]"
        )
    if offsets.dtype != torch.int32 or offsets.shape != weight.shape[:1]:
        raise ValueError(
            f"offsets: {offsets.dtype} {list(offsets.shape)} does not fit; expected torch.int32 [{weight.shape[0]}], "
            "as `tokens_per_expert.cumsum(0).int()` gives"
        )
    if not rows.device == weight.device == offsets.device:
        raise ValueError(
            f"rows, weight, offsets: on {rows.device}, {weight.device}, {offsets.device}; they must be on one device"
        )
