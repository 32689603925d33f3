import dataclasses

import pytest
import torch

from ac_loss import linear_cross_entropy, reference
from ac_loss.backends import triton_backend

pytest.importorskip("triton")

from ac_loss.backends.triton_backend import gradients as gradients_module
from ac_loss.backends.triton_backend import kernels


def relative_error(got, right):
    return ((got.double() - right).norm() / right.norm()).item()


def on(inputs, device):
    return {k: v.to(device) for k, v in inputs.items()}


@pytest.fixture
def check(gradients, device):
    """Loss and gradients against the specification, largest error over largest entry."""

    def run(inputs, most, upstream=1.0, **options):
        inputs = on(inputs, device)
        wide = {k: v.double() if k != "labels" else v for k, v in inputs.items()}
        right, right_grads = gradients(reference.linear_cross_entropy, wide, upstream, **options)
        loss, grads = gradients(linear_cross_entropy, inputs, upstream, backend="triton", **options)
        for got, true in [(loss, right), *((grads[k], right_grads[k]) for k in grads)]:
            assert (got.double() - true).abs().max() <= most * true.abs().max()

    return run


def test_full_tiles(draw, check):
    """The sizes that are launched on a GPU, with a rest in every direction."""
    check(draw(130, 300, 70, dtype=torch.float32), 1e-5)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("width", [13, 16, 48])
@pytest.mark.parametrize("tokens", [1, 16, 70])
def test_odd_sizes(draw, check, tokens, width):
    check(draw(tokens, 201, width, dtype=torch.float32, ignored=0.0), 1e-4, label_smoothing=0.1, softcap=2.0)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("vocab", [1, 2, 16, 17])
def test_small_vocabularies(draw, check, vocab):
    check(draw(40, vocab, 16, dtype=torch.float32), 1e-5, label_smoothing=0.1)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes(draw, check, dtype):
    # The interpreter cuts where a GPU rounds, which is up to twice the error.
    check(draw(70, 201, 48, dtype=dtype), 1.6e-2 if dtype == torch.bfloat16 else 2e-3, softcap=3.0, z_loss=0.01)


@pytest.mark.usefixtures("small_tiles")
def test_the_softcap_is_exact_near_zero_and_far_out(device):
    hidden = torch.tensor([[1e-4], [0.05], [0.099], [0.101], [1.0], [9.0], [30.0], [-30.0]], device=device)
    weight, labels = torch.tensor([[1.0], [-0.3]], device=device), torch.zeros(8, dtype=torch.int64, device=device)
    options = {"softcap": 1.0, "reduction": "none"}
    right = reference.linear_cross_entropy(hidden.double(), weight.double(), labels, **options)
    got = linear_cross_entropy(hidden, weight, labels, backend="triton", **options)
    torch.testing.assert_close(got.double(), right, rtol=3e-7, atol=0)


@pytest.mark.usefixtures("small_tiles")
def test_a_common_offset_leaves_the_loss(device):
    hidden, weight = torch.full((1, 1), 1e8, device=device), torch.ones(40, 1, device=device)
    labels = torch.tensor([17], device=device)
    loss = linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1, backend="triton")
    assert loss.item() == pytest.approx(torch.tensor(40.0).log().item(), rel=1e-6)


@pytest.mark.usefixtures("small_tiles")
def test_masked_classes_get_no_gradient(draw, gradients, device):
    inputs = on(draw(20, 70, 16, dtype=torch.float32, ignored=0.0), device)
    inputs["bias"][:40] = float("-inf")  # whole tiles, and the first of a row
    inputs["labels"] %= 30
    inputs["labels"] += 40
    right, right_grads = gradients(reference.linear_cross_entropy, inputs)
    loss, grads = gradients(linear_cross_entropy, inputs, backend="triton")
    torch.testing.assert_close(loss, right)
    torch.testing.assert_close(grads, right_grads, rtol=1e-4, atol=1e-7)
    assert not grads["weight"][:40].any()


@pytest.mark.usefixtures("small_tiles")
def test_nan_is_not_hidden(draw, device):
    inputs = on(draw(20, 70, 16, dtype=torch.float32, ignored=0.0), device)
    inputs["weight"][50] = float("nan")
    assert linear_cross_entropy(**inputs, backend="triton").isnan()


@pytest.mark.usefixtures("small_tiles")
def test_the_same_bits_every_time(draw, gradients, device):
    inputs = on(draw(70, 201, 16, dtype=torch.float32), device)
    one, two = (gradients(linear_cross_entropy, inputs, backend="triton") for _ in range(2))
    assert torch.equal(one[0], two[0])
    assert all(torch.equal(one[1][name], two[1][name]) for name in one[1])


@pytest.mark.usefixtures("small_tiles")
def test_fp16_gradients_meet_the_loss_scale_before_they_are_rounded(draw, gradients, device):
    inputs = on(draw(60, 301, 16, dtype=torch.float16, ignored=0.1), device)
    inputs["labels"].clamp_(max=149)
    inputs["weight"] *= 0.1
    upstream = 2.0**-10  # what is left is below fp16's smallest number until it is scaled back up
    wide = {k: v.double() if k != "labels" else v for k, v in inputs.items()}
    right = gradients(reference.linear_cross_entropy, wide, 2.0**14 * upstream)[1]["weight"]
    grad = gradients(linear_cross_entropy, inputs, 2.0**14 * upstream, backend="triton")[1]["weight"]
    assert relative_error(grad[150:], right[150:]) < 5e-3


# Memory and work -----------------------------------------------------------------------------------------------------


class NoKernel:
    """Writes nothing. (The interpreter keeps tensors alive for a while.)"""

    def __getitem__(self, grid):
        return lambda *args, **options: None


@pytest.mark.parametrize("frozen", [None, "hidden", "weight"])
@pytest.mark.parametrize("ignored", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_estimate_is_what_it_holds(  # noqa: PLR0917 - fixtures
    draw, peak_bytes, ask, monkeypatch, frozen, ignored, dtype
):
    if torch.cuda.is_available():
        pytest.skip("counts the CPU's allocations")
    for name in ("softmax_statistics", "logit_gradients"):
        monkeypatch.setattr(kernels, name, NoKernel())
    # What a CPU needs for a product in bf16, or into a wider dtype, is not what a GPU needs.
    for name in ("write_product", "add_product"):
        monkeypatch.setattr(gradients_module, name, lambda out, a, b: None)
    monkeypatch.setattr(triton_backend.layout, "PROGRAMS", 16)
    facts = {"tokens": 512, "hidden_size": 512, "vocab": 6000}
    inputs = draw(512, 6000, 512, dtype=dtype, ignored=ignored)
    request = ask(
        dtype,
        **facts,
        counted=int((inputs["labels"] != -100).sum()),
        label_smoothing=0.1,
        grad_hidden=frozen != "hidden",
        grad_weight=frozen != "weight",
    )
    if dtype == torch.float32:
        request = dataclasses.replace(request, bias_dtype=dtype, grad_bias=True)
    else:
        del inputs["bias"]  # a CPU converts a block before it sums it in fp32

    def loss(hidden, weight, labels, bias=None):
        hidden = hidden.detach() if frozen == "hidden" else hidden
        weight = weight.detach() if frozen == "weight" else weight
        return linear_cross_entropy(hidden, weight, labels, bias, backend="triton", label_smoothing=0.1)

    assert peak_bytes(loss, inputs) == pytest.approx(triton_backend.extra_bytes(request), rel=0.08)


@pytest.mark.usefixtures("small_tiles")
def test_only_the_needed_products(draw, recorder, device):
    inputs = on(draw(40, 96, 16, dtype=torch.float32, ignored=0.0), device)
    for hidden_grad, weight_grad in ((True, True), (True, False), (False, True)):
        hidden = inputs["hidden"].detach().requires_grad_(hidden_grad)
        weight = inputs["weight"].detach().requires_grad_(weight_grad)
        loss = linear_cross_entropy(hidden, weight, inputs["labels"], backend="triton")
        recorder.products.clear()
        with recorder:
            loss.backward()
        # Blocks of 16 classes; for hidden's gradient alone, in two parts of the rows.
        parts = 2 if hidden_grad and not weight_grad else 1
        assert len(recorder.products) == 6 * parts * hidden_grad + 6 * weight_grad
    recorder.products.clear()
    with recorder, torch.no_grad():
        linear_cross_entropy(hidden, weight, inputs["labels"], backend="triton")
    assert recorder.products == []


@pytest.mark.usefixtures("small_tiles")
def test_main_grad_receives_the_sum(draw, gradients, device):
    inputs = on(draw(40, 96, 16, dtype=torch.bfloat16), device)
    right = gradients(linear_cross_entropy, inputs, backend="triton")[1]
    weight = torch.nn.Parameter(inputs["weight"])
    weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    hidden = inputs["hidden"].requires_grad_()
    loss = linear_cross_entropy(hidden, weight, inputs["labels"], inputs["bias"], backend="triton", accum="main_grad")
    loss.backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad - 1, right["weight"].float(), rtol=2e-2, atol=1e-5)
    torch.testing.assert_close(hidden.grad, right["hidden"])


# What it cannot ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"grad_mode": "forward"}, "grad_mode is 'forward'"),
        ({"dtype": torch.float16, "weight_dtype": torch.bfloat16}, "convert weight"),
    ],
)
def test_what_it_refuses(ask, device, facts, word):
    (objection,) = triton_backend.objections(ask(device=device, **facts))
    assert word in objection


def test_on_a_cpu_only_under_the_interpreter(ask, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (objection,) = triton_backend.objections(ask())
    assert "kernels are for NVIDIA GPUs" in objection
