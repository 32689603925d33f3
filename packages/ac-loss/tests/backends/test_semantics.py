"""One table for every backend: what it computes equals the specification, or it refuses and says why."""

import pytest
import torch

from ac_loss import linear_cross_entropy
from ac_loss.backends import NAMES
from ac_loss.reference import linear_cross_entropy as spec

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 1.6e-2}
OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "sum over 50": {"reduction": "sum", "num_label_tokens": 50},
    "softcap": {"softcap": 1.5},
    "smoothing": {"label_smoothing": 0.2},
    "z": {"z_loss": 0.05},
    "scale": {"logit_scale": 0.3},
    "all": {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01, "logit_scale": 1.7},
    "all, none": {"reduction": "none", "softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01},
    "param": {"accum": "param"},
    "recompute": {"grad_mode": "recompute"},
}
pytestmark = pytest.mark.usefixtures("small_pieces", "small_tiles")


@pytest.fixture
def inputs(draw, device):
    return {k: v.to(device) for k, v in draw((3, 21), 61, 13, dtype=torch.float32).items() if k != "bias"}


def near(got, right, dtype):
    right = right.double()
    scale = right.abs().max().item() if right.numel() else 0.0
    torch.testing.assert_close(got.double(), right, rtol=0, atol=TOLERANCE[dtype] * max(scale, 1e-30))


def skip_what_the_interpreter_lacks(backend, device, options):
    if backend == "liger" and options.get("softcap") and device == "cpu":
        pytest.skip("Liger's softcap needs a compiled kernel")


def refused(backend, inputs, options):
    """Whether the backend refuses this call; if it does, the call is an error with every reason."""
    message = None
    try:
        linear_cross_entropy(**inputs, **options, backend=backend)
    except ValueError as error:
        message = str(error)
    assert message is None or message.startswith(f"backend: {backend!r} cannot compute this call:\n  - ")
    assert message is None or backend != "torch"
    return message is not None


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_specification_or_refuses(  # noqa: PLR0917 - fixtures
    backend, draw, gradients, device, name, bias, dtype
):
    options = OPTIONS[name]
    skip_what_the_interpreter_lacks(backend, device, options)
    inputs = {k: v.to(device) for k, v in draw((3, 21), 61, 13, dtype=dtype).items() if bias or k != "bias"}
    if refused(backend, inputs, options):
        return
    wide = {k: v.double() if k != "labels" else v for k, v in inputs.items()}
    upstream = torch.linspace(-1, 2, 63, dtype=torch.float64, device=device).reshape(3, 21)
    upstream = upstream if options.get("reduction") == "none" else 1.5
    theirs = {k: v for k, v in options.items() if k not in ("accum", "grad_mode")}
    right, right_grads = gradients(spec, wide, upstream, **theirs)
    loss, grads = gradients(linear_cross_entropy, inputs, upstream, backend=backend, **options)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.shape == right.shape
    near(loss, right, dtype)
    for key, grad in grads.items():
        assert grad.dtype == dtype
        near(grad, right_grads[key], dtype)


def test_every_backend_is_tested(tested_backends):
    assert tested_backends == set(NAMES)


def test_the_table_is_not_all_refusals(backend, inputs):
    assert not refused(backend, inputs, {})


@pytest.mark.parametrize("tokens", [0, 5])
def test_nothing_counts(backend, gradients, device, draw, tokens):
    inputs = {k: v.to(device) for k, v in draw(tokens, 61, 13, dtype=torch.float32, ignored=1.1).items() if k != "bias"}
    loss, grads = gradients(linear_cross_entropy, inputs, backend=backend)
    assert loss.item() == 0.0
    for name, grad in grads.items():
        assert torch.equal(grad, torch.zeros_like(inputs[name]))


def test_a_nan_row_with_an_ignored_label_changes_nothing(backend, gradients, inputs):
    clean = gradients(linear_cross_entropy, inputs, backend=backend)
    dropped = inputs["labels"] == -100
    inputs["hidden"][dropped] = float("nan")
    loss, grads = gradients(linear_cross_entropy, inputs, backend=backend)
    assert torch.equal(loss, clean[0])
    assert all(torch.equal(grads[name], clean[1][name]) for name in grads)
    assert not grads["hidden"][dropped].any()


def test_a_label_out_of_range_is_named(backend, inputs):
    inputs["labels"][1, 2] = -1
    with pytest.raises(IndexError, match="labels: -1 at flat position 23"):
        linear_cross_entropy(**inputs, backend=backend)


def test_upstream_gradient_scales_exactly(backend, gradients, inputs):
    # 4.0 because it is exact in every dtype: a lost factor or one rounding more shows as inequality.
    one, four = (gradients(linear_cross_entropy, inputs, up, backend=backend)[1] for up in (1.0, 4.0))
    assert all(torch.equal(four[name], 4 * one[name]) for name in one)


def test_backward_twice_and_no_second_derivative(backend, inputs):
    hidden, weight = inputs["hidden"].requires_grad_(), inputs["weight"].requires_grad_()
    loss = linear_cross_entropy(hidden, weight, inputs["labels"], backend=backend)
    (3 * loss).backward(retain_graph=True)
    first = hidden.grad.clone(), weight.grad.clone()
    (3 * loss).backward(retain_graph=True)
    torch.testing.assert_close((hidden.grad, weight.grad), tuple(2 * grad for grad in first), rtol=1e-6, atol=1e-9)
    with pytest.raises(RuntimeError, match="create_graph=True needs second derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_leaves_the_other_gradient(backend, gradients, inputs, frozen):
    right = gradients(linear_cross_entropy, inputs)[1]
    leaves = {k: v.requires_grad_(k not in ("labels", frozen)) for k, v in inputs.items()}
    linear_cross_entropy(**leaves, backend=backend).backward()
    other = "weight" if frozen == "hidden" else "hidden"
    assert leaves[frozen].grad is None
    torch.testing.assert_close(leaves[other].grad, right[other], rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert not linear_cross_entropy(**leaves, backend=backend).requires_grad


def test_autocast(backend, gradients, inputs, device):
    options = {"accum": "param"} if backend == "cce" else {}
    with torch.autocast(device, torch.bfloat16):
        if refused(backend, inputs, options):
            return
        loss, grads = gradients(linear_cross_entropy, inputs, backend=backend, **options)
    rounded = {k: v.bfloat16().double() if k != "labels" else v for k, v in inputs.items()}
    right, right_grads = gradients(spec, rounded)
    near(loss, right, torch.bfloat16)
    for name, grad in grads.items():
        assert grad.dtype == torch.float32
        near(grad, right_grads[name], torch.bfloat16)


def test_strides_are_respected(backend, gradients, inputs):
    right, right_grads = gradients(linear_cross_entropy, inputs)
    leaves = {
        "hidden": inputs["hidden"].transpose(0, 1).contiguous().transpose(0, 1),
        "weight": inputs["weight"].t().contiguous().t(),
        "labels": inputs["labels"].t().contiguous().t(),
    }
    assert not any(tensor.is_contiguous() for tensor in leaves.values())
    leaves = {k: v.requires_grad_() if k != "labels" else v for k, v in leaves.items()}
    loss = linear_cross_entropy(**leaves, backend=backend)
    loss.backward()
    torch.testing.assert_close(loss.detach(), right, rtol=1e-5, atol=0)
    for name, grad in right_grads.items():
        torch.testing.assert_close(leaves[name].grad, grad, rtol=1e-4, atol=1e-6)


def test_gradient_accumulation_equals_one_batch(backend, gradients, inputs):
    right, right_grads = gradients(linear_cross_entropy, inputs)
    tokens, weight, total = int((inputs["labels"] != -100).sum()), inputs["weight"].clone().requires_grad_(), 0.0
    for part in (slice(0, 1), slice(1, 3)):
        hidden, labels = inputs["hidden"][part], inputs["labels"][part]
        loss = linear_cross_entropy(hidden, weight, labels, num_label_tokens=tokens, backend=backend)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(right.item(), rel=1e-5)
    torch.testing.assert_close(weight.grad, right_grads["weight"], rtol=1e-4, atol=1e-6)
