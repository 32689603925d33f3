"""Bytes that the ``torch`` backend holds, from the functions that cut its work; nothing is run.

Each function below walks through the one it is named after and adds up what is alive at the fullest moment.
"""

from typing import TYPE_CHECKING

import torch

from ac_loss.backends.torch_backend.chunking import block_rows, chunk_rows, slab_rows, tile_shape
from ac_loss.backends.torch_backend.products import product_dtype

if TYPE_CHECKING:
    from ac_loss.backends.request import Request


def extra_bytes(request: "Request") -> int:
    """Bytes beyond inputs and returned gradients that a forward and backward hold at most.

    For contiguous hidden states, and without a library's own scratch (oneDNN's, for bf16 and fp16 products on a CPU,
    grows with its threads). Gradients that the forward finishes count as returned: the backward scales them in place,
    unless the graph is kept or saved-tensor hooks have held on to them; then they exist twice.
    """
    recompute = request.reduction == "none" or request.grad_mode == "recompute" or request.rounds_to_float16
    if not recompute:
        return request.label_bytes + (_sweep(request) if request.differentiated else sum(_losses(request)))
    most = _statistics_forward(request)
    if request.differentiated:
        most = max(most, _statistics_backward(request))
    return request.label_bytes + most


def _losses(request: "Request") -> tuple[int, int]:
    """``sweep._sweep`` but for the gradients: what lasts through all chunks, and what comes on top for a moment."""
    count, vocab, item, wide = request.counted, request.vocab, _product(request).itemsize, _wide(request)
    size = chunk_rows(count, vocab, item, sum_bytes=_sum_bytes(request))
    height = min(size, count, block_rows(request.device.type, vocab * wide))
    held = count * wide + min(size, count) * vocab * item
    if item != wide:
        held += height * vocab * wide
    projection, rounding = _projection(request, vocab)
    held += projection
    if request.bias_dtype is not None and request.bias_dtype.itemsize != wide:
        held += vocab * wide
    # A conversion begins by giving up the chunk before.
    chunk, moment = _chunk(request, size, again=count > size and request.hidden_dtype == _product(request))
    return held + chunk, max(moment, rounding)


def _sweep(request: "Request") -> int:
    """``sweep._differentiate``, beyond the gradients it returns."""
    count, vocab, width = request.counted, request.vocab, request.hidden_size
    item, wide = _product(request).itemsize, _wide(request)
    size = min(chunk_rows(count, vocab, item, sum_bytes=_sum_bytes(request)), count)
    several = count > size
    held, moment = _losses(request)
    bias = request.grad_bias * vocab * wide
    slope = 0
    if request.objective.softcap is not None:
        slope = min(size, block_rows(request.device.type, vocab * wide)) * vocab * wide
    product = request.grad_hidden * size * width * item
    beside = _projection(request, vocab)[1]
    if request.hidden_dtype != _product(request) and count < request.tokens:
        beside = max(beside, size * width * request.hidden_dtype.itemsize)
    moment = max(moment, slope, bias, product + beside * (product > 0))
    weight = slab = 0
    if request.grad_weight:
        sum_item = _sum_itemsize(request, several=several)
        weight = vocab * width * sum_item
        slab = _slab(request, vocab, sum_item, several=several)
    first = max(moment, product + weight + slab)
    later = max(first, weight + moment) if several else first

    kept = request.accum == "main_grad"
    returned = 0 if kept else request.grad_weight * vocab * width * request.weight_dtype.itemsize
    after = weight + (returned if weight != returned else 0)
    if kept and weight and sum_item < wide:  # `gradients.add_scaled` converts it in the backward
        after += min(vocab, slab_rows(request.device.type, width * wide)) * width * wide
    if request.grad_bias:
        returned += vocab * request.bias_dtype.itemsize
    return bias + max(held + later, after) - returned


def _statistics_forward(request: "Request") -> int:
    """``statistics._RowStatistics.forward``."""
    numbers = 4 if request.objective.label_smoothing else 3
    held, moment = _tiles(request, again=False)
    return held + max(moment, 2 * numbers * request.counted * _wide(request))


def _statistics_backward(request: "Request") -> int:
    """``statistics._differentiate``, beyond the gradients it returns."""
    count, vocab, width = request.counted, request.vocab, request.hidden_size
    wide = _wide(request)
    rows, columns = tile_shape(count, vocab, wide, request.device.type)
    several = count > rows
    held, moment = _tiles(request, again=True)
    held += 7 * count * wide
    slope = rows * columns * wide * (request.objective.softcap is not None)
    slab = _slab(request, rows, wide, several=True) if request.grad_hidden else 0
    block = rounding = 0
    if request.grad_weight and request.accum != "main_grad":
        sum_item = _sum_itemsize(request, several=several)
        block = columns * width * sum_item
        if sum_item != request.weight_dtype.itemsize:
            rounding = columns * width * request.weight_dtype.itemsize
        rounding = max(rounding, _slab(request, columns, sum_item, several=several))
    during = held + max(block * several + max(moment, slope, slab), block + rounding)
    after = held - _projection(request, columns)[0]
    if request.grad_hidden:
        total = count * width * wide
        rounded = count * width * request.hidden_dtype.itemsize * (request.hidden_dtype.itemsize != wide)
        returned = request.tokens * width * request.hidden_dtype.itemsize
        spread = returned * (count < request.tokens)
        # While tiles are worked on, the gradient that is returned in the end does not exist yet.
        during += total - returned
        after += max(total + rounded, (rounded or total) + spread) - returned
    bias = request.grad_bias * vocab * wide
    return bias + max(during, after)


def _tiles(request: "Request", *, again: bool) -> tuple[int, int]:
    """``tiles.Tiles``: its buffers and one tile's operands where these are copies, and what making them adds."""
    count = request.counted
    item, wide = _product(request).itemsize, _wide(request)
    rows, columns = tile_shape(count, request.vocab, wide, request.device.type)
    chunk, moment = _chunk(request, rows, again=again or count > rows)
    held = rows * columns * (item + wide * (item != wide)) + chunk
    matrix, beside = _projection(request, columns)
    return held + matrix, max(moment, beside)


def _chunk(request: "Request", rows: int, *, again: bool) -> tuple[int, int]:
    """Hidden states of some rows where they are picked out or converted, and what is beside them when they are made.

    That is what they are converted from, and the ones before if they are made more than once.
    """
    elements = min(rows, request.counted) * request.hidden_size
    picked = elements * request.hidden_dtype.itemsize * (request.counted < request.tokens)
    converted, beside = _operand(request, elements, request.hidden_dtype)
    lasting = converted or picked
    return lasting, picked * (converted > 0) + beside + lasting * again


def _operand(request: "Request", elements: int, dtype: torch.dtype) -> tuple[int, int]:
    """``products.operand``: the copy, if it is one, and what else is there while it is made."""
    rounded = elements * request.gemm_dtype.itemsize * (dtype != request.gemm_dtype)
    if _product(request) == request.gemm_dtype:
        return rounded, 0
    return elements * _product(request).itemsize, rounded


def _projection(request: "Request", rows: int) -> tuple[int, int]:
    """``products.Projection`` of some rows of the weight: what it holds, and what using it adds for a moment."""
    product = _product(request)
    if product != request.gemm_dtype:
        rows = min(rows, slab_rows(request.device.type, request.hidden_size * product.itemsize))
    return _operand(request, rows * request.hidden_size, request.weight_dtype)


def _slab(request: "Request", rows: int, sum_item: int, *, several: bool) -> int:
    """``products.add_product``: part of a product that is not summed in its own dtype.

    A CPU converts it before it adds it to what is wider.
    """
    width, item = request.hidden_size, _product(request).itemsize
    if sum_item == item:
        return 0
    rows = min(rows, slab_rows(request.device.type, width * item))
    converted = sum_item * (several and sum_item > item and request.device.type == "cpu")
    return rows * width * (item + converted)


def _product(request: "Request") -> torch.dtype:
    return product_dtype(request.gemm_dtype, request.device.type, request.counted)


def _sum_bytes(request: "Request") -> int:
    """``gradients.WeightGradient.sum_bytes``, where ``sweep._sweep`` goes by it."""
    item = _sum_itemsize(request, several=True)
    kept = request.accum == "main_grad" or item == request.weight_dtype.itemsize
    if request.shard or not request.grad_weight or kept:
        return 0
    return request.vocab * request.hidden_size * item


def _wide(request: "Request") -> int:
    return torch.promote_types(request.gemm_dtype, torch.float32).itemsize


def _sum_itemsize(request: "Request", *, several: bool) -> int:
    """Of the dtype that ``gradients.WeightGradient`` is in until its end; ``several`` chunks are summed."""
    own = request.weight_dtype.itemsize
    if not several:
        return _product(request).itemsize if request.accum == "main_grad" else own
    return own if request.accum == "param" else max(own, _wide(request))
