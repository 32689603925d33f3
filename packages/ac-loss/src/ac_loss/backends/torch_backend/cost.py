"""Bytes that the ``torch`` backend holds, from the functions that cut its work; nothing is run.

Each function below walks through the one it is named after and adds up what is alive at the fullest moment.
"""

from typing import TYPE_CHECKING

import torch

from ac_loss.backends.torch_backend.chunking import block_rows, chunk_rows, slab_rows, tile_shape

if TYPE_CHECKING:
    from ac_loss.backends.request import Request


def extra_bytes(request: "Request") -> int:
    """Bytes beyond inputs and returned gradients that a forward and backward hold at most.

    For contiguous hidden states. Gradients that the forward finishes count as returned: the backward scales them in
    place, unless the graph is kept or saved-tensor hooks look at it; then they exist twice.
    """
    labels = 16 * request.counted + 9 * request.tokens
    recompute = (
        request.reduction == "none" or request.grad_mode == "recompute" or request.gemm_dtype == torch.float16
    )
    if not recompute:
        return labels + (_sweep(request) if request.differentiated else _losses(request))
    most = _statistics_forward(request)
    if request.differentiated:
        most = max(most, _statistics_backward(request))
    return labels + most


def _losses(request: "Request") -> int:
    """``sweep._sweep``: what lasts through all chunks, and what one chunk adds, but for the gradients."""
    count, vocab, item, wide = request.counted, request.vocab, request.gemm_dtype.itemsize, _wide(request)
    size = chunk_rows(count, vocab, item)
    height = min(size, count, block_rows(request.device.type, vocab * wide))
    held = count * wide + min(size, count) * vocab * item
    if item != wide:
        held += height * vocab * wide
    if request.weight_dtype != request.gemm_dtype:
        held += vocab * request.hidden_size * item
    if request.bias_dtype is not None and request.bias_dtype.itemsize != wide:
        held += vocab * wide
    return held + _chunk(request, size, more=count > size)


def _sweep(request: "Request") -> int:
    """``sweep._differentiate``, beyond the gradients it returns."""
    count, vocab, width = request.counted, request.vocab, request.hidden_size
    item, wide = request.gemm_dtype.itemsize, _wide(request)
    size = min(chunk_rows(count, vocab, item), count)
    several = count > size
    held = request.grad_bias * vocab * wide
    elementwise = min(size, block_rows(request.device.type, vocab * wide)) * vocab * wide
    elementwise = max(elementwise * (request.objective.softcap is not None), held)
    product = request.grad_hidden * size * width * item
    if request.grad_hidden and request.hidden_dtype != request.gemm_dtype and count < request.tokens:
        product += size * width * request.hidden_dtype.itemsize

    weight_sum = slab = 0
    if request.grad_weight:
        sum_item = _sum_itemsize(request) if several else item
        weight_sum = vocab * width * sum_item
        if sum_item != item:
            slab = _slab(request, vocab)
    first, later = max(elementwise, product + slab + weight_sum), weight_sum + max(elementwise, product + slab)
    during = _losses(request) + held + (later if several else first)

    kept = weight_sum
    converted = 0
    if request.grad_weight and request.accum != "main_grad" and weight_sum != _returned_weight(request):
        converted = _returned_weight(request)
    after = held + kept + converted
    returned = _returned_weight(request) + request.grad_bias * vocab * (request.bias_dtype or request.gemm_dtype).itemsize
    return max(during, after) - (returned if request.accum != "main_grad" else returned - _returned_weight(request))


def _statistics_forward(request: "Request") -> int:
    """``statistics._RowStatistics.forward``."""
    numbers = 4 if request.objective.label_smoothing else 3
    return _tiles(request) + 2 * numbers * request.counted * _wide(request)


def _statistics_backward(request: "Request") -> int:
    """``statistics._differentiate``, beyond the gradients it returns."""
    count, vocab, width = request.counted, request.vocab, request.hidden_size
    item, wide = request.gemm_dtype.itemsize, _wide(request)
    rows, columns = tile_shape(count, vocab, wide, request.device.type)
    held = _tiles(request, again=True) + 7 * count * wide
    slope = rows * columns * wide * (request.objective.softcap is not None)
    slab = _slab(request, rows) if request.grad_hidden and item != wide else 0
    block = rounding = 0
    if request.grad_weight and request.accum != "main_grad":
        several = count > rows
        sum_item = _sum_itemsize(request) if several else item
        block = columns * width * sum_item
        rounding = columns * width * request.weight_dtype.itemsize * (sum_item != request.weight_dtype.itemsize)
        if several and sum_item != item:
            rounding = max(rounding, _slab(request, columns))
    during = held + max(block + max(slope, slab) if count > rows else max(slope, slab), block + rounding)
    # The last block's names outlive the loop.
    after = held + block
    if request.grad_hidden:
        total = count * width * wide
        rounded = count * width * request.hidden_dtype.itemsize * (request.hidden_dtype.itemsize != wide)
        spread = request.tokens * width * request.hidden_dtype.itemsize * (count < request.tokens)
        returned = request.tokens * width * request.hidden_dtype.itemsize
        # While tiles are worked on, the gradient that is returned in the end does not exist yet.
        during += total - returned
        after += total + rounded + spread - returned
    if request.grad_bias:
        during += vocab * wide
        after += vocab * wide
    return max(during, after)


def _tiles(request: "Request", *, again: bool = False) -> int:
    """``tiles.Tiles``: its buffers, and the operands of one tile where they are copies; ``again`` if each is made for every tile."""
    count, width = request.counted, request.hidden_size
    item, wide = request.gemm_dtype.itemsize, _wide(request)
    rows, columns = tile_shape(count, request.vocab, wide, request.device.type)
    held = rows * columns * (item + wide * (item != wide)) + _chunk(request, rows, more=again or count > rows)
    if request.weight_dtype != request.gemm_dtype:
        held += columns * width * item
    return held


def _chunk(request: "Request", rows: int, *, more: bool) -> int:
    """The hidden states of some rows where they must be picked out or converted; the next ones are made before they go."""
    rows = min(rows, request.counted)
    picked = rows * request.hidden_size * request.hidden_dtype.itemsize * (request.counted < request.tokens)
    converted = rows * request.hidden_size * request.gemm_dtype.itemsize * (request.hidden_dtype != request.gemm_dtype)
    lasting = converted or picked
    return max(lasting, picked + converted) + lasting * more


def _slab(request: "Request", rows: int) -> int:
    """``gradients.add_product`` where the sum is wider than the product, which a CPU converts before it adds it."""
    width, item = request.hidden_size, request.gemm_dtype.itemsize
    rows = min(rows, slab_rows(request.device.type, width * item))
    return rows * width * (item + _wide(request) * (request.device.type == "cpu"))


def _wide(request: "Request") -> int:
    return torch.promote_types(request.gemm_dtype, torch.float32).itemsize


def _sum_itemsize(request: "Request") -> int:
    """Of the dtype that the weight's gradient is summed in over chunks."""
    return request.weight_dtype.itemsize if request.accum == "param" else max(_wide(request), request.weight_dtype.itemsize)


def _returned_weight(request: "Request") -> int:
    return request.grad_weight * request.vocab * request.hidden_size * request.weight_dtype.itemsize
