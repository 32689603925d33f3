"""The two kernels: softmax statistics of a range of the vocabulary, and the gradient of a block of logits.

Both make a tile of logits on tensor cores with fp32 sums and never store it. Rows that do not count are dropped before.
Offsets are 64-bit: tokens times vocabulary passes 2**31 at real sizes. This module needs triton; the interpreter
(``TRITON_INTERPRET=1``) runs it on CPU tensors.
"""
# ruff: noqa: N803, PLR0917 - compile-time constants are in capitals, and a kernel takes no structures

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    """To a few roundings everywhere, in operations that the interpreter has as well (libdevice's tanh it has not)."""
    size = tl.abs(x)
    shrunk = tl.exp(-2.0 * size)
    far = (1.0 - shrunk) / (1.0 + shrunk)
    # 1 - shrunk cancels near 0: the first terms of the series are exact to fp32 there.
    square = x * x
    near = size * (1.0 - square * (0.33333333333 - square * (0.13333333333 - square * 0.05396825397)))
    value = tl.where(size < 0.1, near, far)
    return tl.where(x < 0, -value, value)


@triton.jit
def _logits(
    hidden,
    weight,
    bias,
    rows,
    columns,
    hidden_size,
    hidden_row_stride,
    hidden_stride,
    weight_row_stride,
    weight_stride,
    bias_stride,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EVEN: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """``[rows, columns]`` of the logits in fp32, and of the derivative of the softcap (1 without one)."""
    offsets = tl.arange(0, BLOCK_WIDTH).to(tl.int64)
    left = hidden + rows[:, None] * hidden_row_stride + offsets[None, :] * hidden_stride
    right = weight + columns[None, :] * weight_row_stride + offsets[:, None] * weight_stride
    x = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for start in range(0, hidden_size, BLOCK_WIDTH):
        if EVEN:
            a = tl.load(left)
            b = tl.load(right)
        else:
            a = tl.load(left, mask=offsets[None, :] < hidden_size - start, other=0.0)
            b = tl.load(right, mask=offsets[:, None] < hidden_size - start, other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        # "ieee" speaks of fp32 operands: TF32 would make the loss worse than plain cross-entropy's.
        x = tl.dot(a, b, x, input_precision="ieee")
        left += BLOCK_WIDTH * hidden_stride
        right += BLOCK_WIDTH * weight_stride
    if HAS_BIAS:
        x += tl.load(bias + columns * bias_stride).to(tl.float32)[None, :]
    slope = 1.0
    if HAS_SOFTCAP:
        x = _tanh(x * (logit_scale / softcap))
        slope = 1.0 - x * x
        x *= softcap
    else:
        x *= logit_scale
    return x, slope


@triton.jit
def softmax_statistics(
    hidden,
    weight,
    bias,
    labels,
    tops,
    totals,
    sums,
    hits,
    tokens,
    vocab,
    tiles,
    hidden_size,
    hidden_row_stride,
    hidden_stride,
    weight_row_stride,
    weight_stride,
    bias_stride,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    EVEN: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """One block of rows, ``tiles`` tiles of the vocabulary one after the other, merged as they come.

    Writes for each split of the vocabulary and each row, ``[splits, tokens]``: ``tops`` the largest logit, ``totals``
    the sum of ``exp(logit - top)``, ``sums`` the sum of ``logit - top``. The one split that holds a row's label writes
    its logit to ``hits [tokens]``. So every element has one writer: no locks, no atomics, the same bits every time.
    """
    # Programs that run together differ in their rows, and read the same columns of the weight from L2.
    split = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    counted = rows < tokens
    rows = tl.minimum(rows, tokens - 1).to(tl.int64)
    label = tl.load(labels + rows)

    top = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    anchor = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    total = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    shifted = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    hit = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    first = split * tiles * BLOCK_COLUMNS
    last = tl.minimum(first + tiles * BLOCK_COLUMNS, vocab)
    for start in range(first, last, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        inside = (columns < vocab)[None, :]
        x, _ = _logits(
            hidden,
            weight,
            bias,
            rows,
            tl.minimum(columns, vocab - 1).to(tl.int64),
            hidden_size,
            hidden_row_stride,
            hidden_stride,
            weight_row_stride,
            weight_stride,
            bias_stride,
            logit_scale,
            softcap,
            HAS_BIAS,
            HAS_SOFTCAP,
            EVEN,
            UPCAST,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
            BLOCK_WIDTH,
        )
        hit += tl.sum(tl.where((columns[None, :] == label[:, None]) & inside, x, 0.0), 1)
        x = tl.where(inside, x, float("-inf"))
        new_top = tl.maximum(top, tl.max(x, 1))
        # Classes may be masked by -inf: -inf - -inf would be NaN.
        new_anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        x -= new_anchor[:, None]
        total = total * tl.exp(top - new_anchor) + tl.sum(tl.exp(x), 1)
        if HAS_SUMS:
            shifted += (anchor - new_anchor) * (start - first) + tl.sum(tl.where(inside, x, 0.0), 1)
        top = new_top
        anchor = new_anchor

    here = split.to(tl.int64) * tokens + rows
    tl.store(tops + here, top, mask=counted)
    tl.store(totals + here, total, mask=counted)
    if HAS_SUMS:
        tl.store(sums + here, shifted, mask=counted)
    tl.store(hits + rows, hit, mask=counted & (label >= first) & (label < last))


@triton.jit
def logit_gradients(
    hidden,
    weight,
    bias,
    labels,
    tops,
    scales,
    pulls,
    out,
    tokens,
    first,
    last,
    hidden_size,
    hidden_row_stride,
    hidden_stride,
    weight_row_stride,
    weight_stride,
    bias_stride,
    out_row_stride,
    logit_scale,
    softcap,
    label_share,
    other_share,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EVEN: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Gradient of the logits of classes ``first`` to ``last``, written to ``out [tokens, last - first]``.

    ``(exp(logit - top) * scale - pull * share) * slope`` with ``share = label_share`` added at the label.
    """
    # GROUP blocks of rows go through the columns together, so that both operands come from L2.
    row_blocks = tl.cdiv(tokens, BLOCK_ROWS)
    column_blocks = tl.cdiv(last - first, BLOCK_COLUMNS)
    program = tl.program_id(0)
    group = program // (GROUP * column_blocks)
    height = tl.minimum(row_blocks - group * GROUP, GROUP)
    within = program % (GROUP * column_blocks)
    rows = (group * GROUP + within % height) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = first + (within // height) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    written = (rows < tokens)[:, None] & (columns < last)[None, :]
    rows = tl.minimum(rows, tokens - 1).to(tl.int64)
    columns = tl.minimum(columns, last - 1).to(tl.int64)
    x, slope = _logits(
        hidden,
        weight,
        bias,
        rows,
        columns,
        hidden_size,
        hidden_row_stride,
        hidden_stride,
        weight_row_stride,
        weight_stride,
        bias_stride,
        logit_scale,
        softcap,
        HAS_BIAS,
        HAS_SOFTCAP,
        EVEN,
        UPCAST,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
        BLOCK_WIDTH,
    )
    label = tl.load(labels + rows)
    pull = tl.load(pulls + rows)[:, None]
    share = other_share + tl.where(columns[None, :] == label[:, None], label_share, 0.0)
    x = tl.exp(x - tl.load(tops + rows)[:, None]) * tl.load(scales + rows)[:, None] - pull * share
    x *= slope
    at = out + rows[:, None] * out_row_stride + (columns - first)[None, :]
    tl.store(at, x.to(out.dtype.element_ty), mask=written)
