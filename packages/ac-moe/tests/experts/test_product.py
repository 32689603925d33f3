import functools

import pytest
import torch
from ac_moe_local import matrix_products
from torch._subclasses.fake_tensor import FakeTensorMode

from ac_moe.experts import grouped_mm

KERNEL = [(torch.float32, 8, 12), (torch.bfloat16, 8, 16), (torch.float16, 16, 8)]
PER_EXPERT = [(torch.float64, 8, 12), (torch.float32, 7, 12), (torch.float32, 8, 5), (torch.bfloat16, 12, 8)]


def offsets(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def operands(dtype: torch.dtype, k: int, n: int, rows: int = 7, experts: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    made = torch.randn(rows, k).to(dtype), torch.randn(experts, k, n).to(dtype)
    return made[0].requires_grad_(), made[1].requires_grad_()


def one_by_one(rows: torch.Tensor, weight: torch.Tensor, ends: list[int]) -> torch.Tensor:
    blocks = zip([0, *ends], [*ends, rows.shape[0]], strict=True)
    experts = [*weight, weight[-1] * 0]  # the last for rows that are left over
    return torch.cat([rows[a:b] @ expert for (a, b), expert in zip(blocks, experts, strict=True)])


@pytest.mark.parametrize("ends", [[3, 3, 7], [0, 0, 7], [2, 3, 5], [0, 0, 0]], ids=str)
@pytest.mark.parametrize(("dtype", "k", "n"), [*KERNEL, *PER_EXPERT], ids=str)
def test_is_the_product_of_each_expert_bit_for_bit(dtype: torch.dtype, k: int, n: int, ends: list[int]) -> None:
    rows, weight = operands(dtype, k, n)
    output = grouped_mm(rows, weight, offsets(*ends))
    kernel = (dtype, k, n) in KERNEL
    assert output.grad_fn.name() == ("GroupedMmBackward0" if kernel else "_PerExpertBackward")
    grad = torch.randn(output.shape).to(dtype)
    actual = [output, *torch.autograd.grad(output, (rows, weight), grad)]
    expected = one_by_one(rows, weight, ends)
    expected = [expected, *torch.autograd.grad(expected, (rows, weight), grad)]
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize(("dtype", "k", "n"), [KERNEL[0], PER_EXPERT[0]], ids=str)
def test_no_rows(dtype: torch.dtype, k: int, n: int) -> None:
    rows, weight = operands(dtype, k, n, rows=0)
    output = grouped_mm(rows, weight, offsets(0, 0, 0))
    assert output.shape == (0, n)
    output.sum().backward()
    assert rows.grad.shape == (0, k)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("padded", [None, True])
def test_rows_left_over_may_hold_anything_and_give_zero(padded: bool | None) -> None:
    torch.use_deterministic_algorithms(True)  # fills memory that nobody wrote with NaN
    try:
        rows, weight = operands(torch.float32, 8, 12)
        with torch.no_grad():
            rows[5:] = float("nan")
        output = grouped_mm(rows, weight, offsets(2, 2, 5), padded=padded)
        (output * torch.full_like(output, 2)).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(output[5:], torch.zeros(2, 12))
    assert torch.equal(rows.grad[5:], torch.zeros(2, 8))
    assert rows.grad[:5].abs().sum(1).all()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("grad", ["sum", "transposed"])
def test_gradients_that_are_not_dense(grad: str) -> None:
    rows, weight = operands(torch.float32, 8, 8, rows=8)
    output = grouped_mm(rows, weight, offsets(2, 5, 8))
    loss = output.sum() if grad == "sum" else (output.t() * torch.arange(64.0).view(8, 8)).sum()
    actual = torch.autograd.grad(loss, (rows, weight))
    output = one_by_one(rows, weight, [2, 5, 8])
    loss = output.sum() if grad == "sum" else (output.t() * torch.arange(64.0).view(8, 8)).sum()
    for one, other in zip(actual, torch.autograd.grad(loss, (rows, weight)), strict=True):
        torch.testing.assert_close(one, other)


def test_layouts() -> None:
    """Views that the kernel refuses are copied; a transposed weight is taken as it is."""
    rows, weight = operands(torch.float32, 8, 12)
    expected = grouped_mm(rows, weight, offsets(2, 2, 7))
    wide = torch.zeros(7, 9)
    wide[:, 1:] = rows.detach()  # stride 9, offset 1
    assert torch.equal(grouped_mm(wide[:, 1:], weight, offsets(2, 2, 7)), expected)
    assert torch.equal(grouped_mm(rows.t().contiguous().t(), weight, offsets(2, 2, 7)), expected)
    flipped = weight.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    assert not flipped.is_contiguous()
    output = grouped_mm(rows, flipped, offsets(2, 2, 7))
    assert torch.allclose(output, expected)
    assert output.grad_fn._saved_mat2.stride() == flipped.stride()
    (one,) = torch.autograd.grad(output.sum(), flipped)
    assert torch.allclose(one, torch.autograd.grad(expected.sum(), weight)[0])


def test_autocast() -> None:
    rows, weight = operands(torch.float32, 8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        output = grouped_mm(rows, weight, offsets(2, 2, 7))
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, grouped_mm(rows.bfloat16(), weight.bfloat16(), offsets(2, 2, 7)))
    output.sum().backward()
    assert rows.grad.dtype == weight.grad.dtype == torch.float32


def test_multiplies_no_more_than_it_must() -> None:
    rows, weight = operands(torch.float64, 8, 12)
    with matrix_products() as products:
        output = grouped_mm(rows, weight.detach(), offsets(2, 2, 7))
    assert products.count == 2  # of three experts one has no rows
    with matrix_products() as products:
        output.sum().backward()
    assert products.count == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("device", ["meta", "fake"])
def test_shapes_without_values(device: str, dtype: torch.dtype) -> None:
    """What a memory estimate runs a model on."""
    make = functools.partial(torch.randn, dtype=dtype, requires_grad=True)
    if device == "meta":
        make = functools.partial(make, device="meta")
        ends = torch.empty(3, dtype=torch.int32, device="meta")
        output = grouped_mm(make(7, 8), make(3, 8, 16), ends)
        output.sum().backward()
    else:
        with FakeTensorMode():
            output = grouped_mm(make(7, 8), make(3, 8, 16), torch.empty(3, dtype=torch.int32))
            output.sum().backward()
    assert output.shape == (7, 16)
    assert output.dtype == dtype


R, W, ENDS = torch.ones(7, 8), torch.ones(3, 8, 12), offsets(2, 2, 7)


@pytest.mark.parametrize(
    ("rows", "weight", "ends", "message"),
    [
        (R[0], W, ENDS, r"rows: torch.float32 \[8\] does not fit; expected floating \[R, K\]"),
        (R.long(), W, ENDS, "rows: torch.int64"),
        (R, W[0], ENDS, r"weight: torch.float32 \[8, 12\] does not fit; expected floating \[E, 8, N\]"),
        (R, torch.ones(3, 4, 12), ENDS, r"weight: .* expected floating \[E, 8, N\]"),
        (R, torch.ones(0, 8, 12), ENDS[:0], r"weight: torch.float32 \[0, 8, 12\] does not fit"),
        (R, W.bfloat16(), ENDS, "weight: torch.bfloat16, rows: torch.float32; they must be of one dtype"),
        (R, W, ENDS.long(), r"offsets: torch.int64 \[3\] does not fit; expected torch.int32 \[3\], as `tokens_per_"),
        (R, W, ENDS[:2], r"offsets: torch.int32 \[2\]"),
        (R, W, offsets(2, 2, 8), r"offsets: \[2, 2, 8\] do not rise from 0 to at most 7, the number of rows"),
        (R, W, offsets(3, 2, 7), "do not rise"),
        (R, W, offsets(-1, 2, 7), "do not rise"),
        (R, W.to("meta"), ENDS, "rows, weight, offsets: on cpu, meta, cpu; they must be on one device"),
    ],
)
def test_mistakes(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grouped_mm(rows, weight, ends)


def test_sizes_that_an_accelerator_cannot_take() -> None:
    make = functools.partial(torch.empty, device="cuda", dtype=torch.bfloat16)
    message = r"weight: \[3, 8, 12\], but on cuda a grouped GEMM of torch.bfloat16 needs K and N to be multiples of 8"
    with FakeTensorMode(), pytest.raises(ValueError, match=message):
        grouped_mm(make(7, 8), make(3, 8, 12), make(3, dtype=torch.int32))
