"""In which dtype to multiply, and products with the weight.

NOTE [ Narrow operands, wide products ]
A bf16 product pays where the processor has units for it: a GPU's, or AMX in a CPU. A CPU with vector instructions alone
(or with none for bf16) takes longer for a bf16 product than for the fp32 one: 1.5 times as long was measured with
AVX512_BF16. There, hidden states and weight are rounded to bf16 as ever, and multiplied in fp32: a bf16 number is an
fp32 number, so converting it is exact, and nothing that follows is rounded to bf16 before the gradients are returned.
1. The weight is converted a slab at a time, into one buffer: whole it would be twice as large as the one that is there.
2. Every slab is converted for each product. For few tokens that would be most of the work: they are multiplied in bf16.
3. The choice is by what the processor has and the number of tokens, never by timing, so one machine always gives the
   same numbers.
"""

import functools
from collections.abc import Iterator

import torch

from ac_loss.backends.torch_backend.chunking import slab_rows, spans

WIDE_TOKENS = 64  # at least; measured: with 32 tokens bf16 products are faster in some modes, with 48 in none


def product_dtype(gemm_dtype: torch.dtype, device_type: str, tokens: int) -> torch.dtype:
    """The dtype that operands rounded to ``gemm_dtype`` are multiplied in; of the products too.

    Args:
        gemm_dtype: dtype of the operands.
        device_type: where.
        tokens: rows in all that are multiplied with the weight.
    """
    if gemm_dtype == torch.bfloat16 and device_type == "cpu" and tokens >= WIDE_TOKENS and cpu_is_slow_in_bfloat16():
        return torch.float32
    return gemm_dtype


@functools.cache
def cpu_is_slow_in_bfloat16() -> bool:
    """Whether this CPU multiplies bf16 matrices more slowly than fp32 ones.

    True for x86 without AMX, but for AVX512_BF16 of others than Intel (Zen 4 runs it at twice the rate of fp32). False
    for other architectures, and where torch does not tell what the processor has.
    """
    if not hasattr(torch.cpu, "get_capabilities"):
        return False
    has = torch.cpu.get_capabilities()
    if has.get("architecture") != "x86_64" or has.get("amx_bf16"):
        return False
    return not has.get("avx512_bf16") or "intel" in str(has.get("cpu_name", "")).lower()


def operand(tensor: torch.Tensor, gemm_dtype: torch.dtype, product: torch.dtype) -> torch.Tensor:
    """``tensor`` rounded to ``gemm_dtype``, in the dtype of its products (``product_dtype``); itself where it is so."""
    return tensor.to(gemm_dtype).to(product)


class Projection:
    """The weight as a factor of products.

    Args:
        weight: ``[V, H]``.
        gemm_dtype: what it is rounded to.
        product: what it is multiplied in, ``product_dtype`` of that.
    """

    def __init__(self, weight: torch.Tensor, gemm_dtype: torch.dtype, product: torch.dtype) -> None:
        self._gemm_dtype, self._buffer = gemm_dtype, None
        if product == gemm_dtype:
            self._weight = weight.to(gemm_dtype)
        else:
            self._weight, (height, width) = weight, weight.shape
            rows = min(height, slab_rows(weight.device.type, width * product.itemsize))
            self._buffer = weight.new_empty(rows, width, dtype=product)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """``hidden @ weight.T``, ``[rows, V]``, in ``out``."""
        for classes, slab in self._slabs():
            torch.mm(hidden, slab.t(), out=out[:, classes])
        return out

    def gradient(self, grad_logits: torch.Tensor) -> torch.Tensor:
        """``grad_logits @ weight``, ``[rows, H]``."""
        # A tensor of ours: a selective checkpoint around the loss keeps results of `mm`, and this one changes.
        total = grad_logits.new_empty(len(grad_logits), self._weight.shape[1])
        self.add_gradient(grad_logits, total, first=True)
        return total

    def add_gradient(self, grad_logits: torch.Tensor, total: torch.Tensor, *, first: bool = False) -> None:
        """``total += grad_logits @ weight``, or ``=`` for the ``first`` one; ``[rows, H]``, of any dtype."""
        for classes, slab in self._slabs():
            add_product(total, grad_logits[:, classes], slab, first=first and not classes.start)

    def _slabs(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """All rows, in order; one slab, the weight itself, where it needs no conversion."""
        if self._buffer is None:
            yield slice(0, len(self._weight)), self._weight
            return
        for start, stop in spans(len(self._weight), len(self._buffer)):
            yield slice(start, stop), self._buffer[: stop - start].copy_(self._weight[start:stop].to(self._gemm_dtype))


def add_product(target: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, first: bool = False) -> None:
    """``target += left @ right``, or ``=`` for the first one; ``target`` may be of another dtype than the factors."""
    if target.dtype == right.dtype:
        torch.mm(left, right, out=target) if first else target.addmm_(left, right)
        return
    # A slab of rows at a time, for at real sizes the whole product would be a GiB. It is in the dtype of the factors
    # and the sum in the wider of both.
    height, width = target.shape
    rows = max(1, min(height, slab_rows(right.device.type, width * right.element_size())))
    slab = right.new_empty(rows, width)
    wider = right.element_size() > target.element_size()
    for start, stop in spans(height, rows):
        part, total = slab[: stop - start], target[start:stop]
        if first:
            total.copy_(torch.mm(left[start:stop], right, out=part))
        elif wider:
            total.copy_(part.copy_(total).addmm_(left[start:stop], right))
        else:
            total.add_(torch.mm(left[start:stop], right, out=part))
