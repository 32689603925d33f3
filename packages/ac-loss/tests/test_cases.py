"""Cases from public reports, by their id, with the right values computed by hand or by plain torch in fp64."""

import pytest
import torch
import torch.nn.functional as F

from ac_loss import FusedLinearCrossEntropy, linear_cross_entropy, reference, token_statistics
from ac_loss.backends.torch_backend import chunking

# Every way to compute a sum or mean here, and one loss per token.
WAYS = [{"grad_mode": "forward"}, {"grad_mode": "recompute"}, {"reduction": "none"}]
each_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: next(iter(way.values())))
each_grad_mode = pytest.mark.parametrize("grad_mode", ["forward", "recompute"])


@pytest.fixture
def tiny():
    """fp64 hidden [6, 8], weight [11, 8] and labels, the first one ignored."""
    torch.manual_seed(0)
    hidden = torch.randn(6, 8, dtype=torch.float64)
    weight = torch.randn(11, 8, dtype=torch.float64)
    labels = torch.randint(0, 11, (6,))
    labels[0] = -100
    return hidden, weight, labels


@each_grad_mode
@pytest.mark.parametrize(
    ("options", "right"),
    [
        ({}, 5.07684351),
        ({"reduction": "sum"}, 25.38421756),
        ({"reduction": "sum", "num_label_tokens": 20}, 1.26921088),
        ({"reduction": "mean", "num_label_tokens": torch.tensor(20)}, 1.26921088),
        ({"reduction": "mean", "num_label_tokens": torch.tensor(20.0)}, 1.26921088),
        ({"softcap": 2.0}, 3.28356095),
        ({"label_smoothing": 0.1}, 5.00290302),
        ({"z_loss": 1e-4}, 5.07684351 + 1.7148162e-3),
    ],
)
def test_right_values(tiny, grad_mode, options, right):
    assert linear_cross_entropy(*tiny, grad_mode=grad_mode, **options).item() == pytest.approx(right, rel=1e-8)


@each_way
@pytest.mark.parametrize("tokens", [0, 5])
def test_loss_01_no_label_counts(draw, gradients, tokens, way):
    inputs = draw(tokens, 31, 13, dtype=torch.float32, ignored=1.1)
    loss, grads = gradients(linear_cross_entropy, inputs, **way)
    assert torch.equal(loss, torch.zeros(tokens if way.get("reduction") == "none" else ()))
    assert all(torch.equal(grad, torch.zeros_like(inputs[name])) for name, grad in grads.items())


@each_grad_mode
@pytest.mark.parametrize("function", [linear_cross_entropy, reference.linear_cross_entropy])
def test_loss_01_torch_s_nan_on_request(draw, gradients, grad_mode, function):
    inputs = draw(5, 31, 13, ignored=1.1)
    option = {"grad_mode": grad_mode} if function is linear_cross_entropy else {}
    loss, grads = gradients(function, inputs, strict_nan=True, **option)
    assert loss.isnan()
    assert all(torch.equal(grad, torch.zeros_like(inputs[name])) for name, grad in grads.items())
    # Only the mean has a 0 to divide by, and only where nothing counts.
    inputs["labels"][0] = 3
    assert function(**inputs, strict_nan=True, **option) == function(**inputs, **option)
    inputs["labels"][0] = -100
    for others in ({"reduction": "sum"}, {"num_label_tokens": 7}):
        assert function(**inputs, strict_nan=True, **others, **option) == 0
    assert FusedLinearCrossEntropy(reduction="mean", strict_nan=True)(
        inputs["hidden"], inputs["labels"], inputs["weight"]
    ).isnan()


@pytest.mark.parametrize("function", [linear_cross_entropy, token_statistics])
@pytest.mark.parametrize(("value", "position"), [(31, 7), (-1, 0), (10**12, 19), (-101, 3)])
def test_loss_02_a_label_out_of_range_is_named(draw, recorder, function, value, position):
    inputs = draw((4, 5), 31, 13)
    inputs["labels"].view(-1)[position] = value
    message = rf"labels: {value} at flat position {position} is not in \[0, 31\) and is not ignore_index \(-100\)"
    with recorder, pytest.raises(IndexError, match=message):
        function(**inputs)
    assert recorder.products == []


@each_way
def test_loss_03_a_nan_row_with_an_ignored_label_changes_nothing(draw, gradients, way):
    inputs = draw(30, 31, 13, ignored=0.3)
    dropped = inputs["labels"] == -100
    clean = gradients(linear_cross_entropy, inputs, **way)
    inputs["hidden"][dropped] = float("nan")
    loss, grads = gradients(linear_cross_entropy, inputs, **way)
    assert torch.equal(loss, clean[0])
    assert all(torch.equal(grads[name], clean[1][name]) for name in grads)
    assert dropped.any()
    assert not grads["hidden"][dropped].any()


def test_loss_04_a_gradient_for_each_token_enters_before_the_weight_gradient(draw, gradients):
    inputs = draw(30, 31, 13)
    upstream = torch.linspace(-2, 3, 30, dtype=torch.float64)
    right = gradients(reference.linear_cross_entropy, inputs, upstream, reduction="none")[1]
    grads = gradients(linear_cross_entropy, inputs, upstream, reduction="none")[1]
    torch.testing.assert_close(grads, right, rtol=1e-12, atol=1e-13)


@each_grad_mode
def test_loss_05_gradient_accumulation_equals_one_batch(draw, gradients, grad_mode):
    inputs = draw((6, 10), 31, 13)
    right, right_grads = gradients(reference.linear_cross_entropy, inputs)
    tokens = int((inputs["labels"] != -100).sum())
    parts = [slice(0, 1), slice(1, 4), slice(4, 6)]
    assert len({int((inputs["labels"][part] != -100).sum()) for part in parts}) == 3
    weight, total = inputs["weight"].clone().requires_grad_(), 0.0
    options = {"num_label_tokens": tokens, "grad_mode": grad_mode}
    for part in parts:
        loss = linear_cross_entropy(inputs["hidden"][part], weight, inputs["labels"][part], inputs["bias"], **options)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(right.item(), rel=1e-12)
    torch.testing.assert_close(weight.grad, right_grads["weight"], rtol=1e-12, atol=1e-14)


@each_way
def test_loss_06_an_upstream_gradient_scales_exactly(draw, gradients, way):
    # 4.0 because it is exact in every dtype: any double rounding or lost factor shows as inequality.
    inputs = draw(40, 31, 13, dtype=torch.bfloat16)
    one, four = (gradients(linear_cross_entropy, inputs, up, **way)[1] for up in (1.0, 4.0))
    assert all(torch.equal(four[name], 4 * one[name]) for name in one)
    inputs = draw(40, 31, 13)
    one, three = (gradients(linear_cross_entropy, inputs, up, **way)[1] for up in (1.0, 3.0))
    torch.testing.assert_close(three, {name: 3 * grad for name, grad in one.items()}, rtol=1e-13, atol=1e-15)


@each_way
def test_loss_07_backward_twice(draw, way):
    inputs = draw(40, 31, 13, dtype=torch.float32)
    hidden, weight = inputs["hidden"].requires_grad_(), inputs["weight"].requires_grad_()
    loss = linear_cross_entropy(hidden, weight, inputs["labels"], **way).sum()
    loss.backward(retain_graph=True)
    first = hidden.grad.clone(), weight.grad.clone()
    loss.backward(retain_graph=True)
    assert torch.equal(hidden.grad, 2 * first[0])
    assert torch.equal(weight.grad, 2 * first[1])
    # What the caller does to its gradients must not reach the saved ones.
    hidden.grad.zero_(), weight.grad.zero_()
    (3 * loss).backward(retain_graph=True)
    torch.testing.assert_close((hidden.grad, weight.grad), tuple(3 * grad for grad in first), rtol=1e-5, atol=1e-6)
    hidden.grad, weight.grad = None, None
    loss.backward()
    assert torch.equal(hidden.grad, first[0])
    assert torch.equal(weight.grad, first[1])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@each_way
def test_loss_07_double_backward_is_refused(draw, way):
    inputs = draw(9, 31, 13)
    hidden = inputs["hidden"].requires_grad_()
    loss = linear_cross_entropy(hidden, inputs["weight"], inputs["labels"], **way).sum()
    with pytest.raises(RuntimeError, match=r"create_graph=True needs second derivatives.*ac_loss\.reference"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def relative_error(got, right):
    return ((got.double() - right).norm() / right.norm()).item()


@pytest.mark.usefixtures("bf16_products")
def test_loss_08_bf16_weight_gradient_over_many_chunks(draw, gradients, monkeypatch):
    for name in ("ROWS_NARROW", "ROWS_WIDE", "ROWS_FLOOR", "TILE_ROWS"):
        monkeypatch.setattr(chunking, name, 16)
    inputs = draw(4096, 257, 32, dtype=torch.bfloat16, ignored=0.0)
    del inputs["bias"]
    plain = lambda hidden, weight, labels: F.cross_entropy(F.linear(hidden, weight).float(), labels)  # noqa: E731
    wide = {k: v.double() if k != "labels" else v for k, v in inputs.items()}
    right = gradients(reference.linear_cross_entropy, wide)[1]["weight"]
    plain_error, forward_error, recompute_error, param_error = (
        relative_error(gradients(function, inputs, **options)[1]["weight"], right)
        for function, options in (
            (plain, {}),
            (linear_cross_entropy, {}),
            (linear_cross_entropy, {"grad_mode": "recompute"}),
            (linear_cross_entropy, {"accum": "param"}),
        )
    )
    assert forward_error <= 1.2 * plain_error
    assert recompute_error <= 1.2 * plain_error
    # 256 sums rounded to bf16: what accum="fp32" is for, and why the lines above can fail.
    assert param_error > 2 * plain_error


@each_grad_mode
def test_loss_09_the_bf16_loss_is_summed_in_fp32(draw, grad_mode):
    inputs = draw(8192, 64, 8, dtype=torch.bfloat16, ignored=0.0)
    wide = {k: v.double() if k != "labels" else v for k, v in inputs.items()}
    loss, right = linear_cross_entropy(**inputs, grad_mode=grad_mode), reference.linear_cross_entropy(**wide)
    assert loss.dtype == torch.float32
    # A sum in bf16 stops growing: off by 10 % and more. Rounded logits alone: 1e-4.
    assert loss.item() == pytest.approx(right.item(), rel=5e-4)


@each_way
def test_loss_10_a_frozen_weight_has_no_product_and_no_buffer(draw, recorder, way):
    inputs = draw(8, 31, 1000)  # the weight is larger than anything else
    hidden = inputs["hidden"].requires_grad_()
    with recorder:
        linear_cross_entropy(hidden, inputs["weight"], inputs["labels"], **way).sum().backward()
    assert recorder.largest < inputs["weight"].numel()
    # Logits (twice where they are computed again) and the gradient of hidden.
    assert len(recorder.products) == (2 if way == {"grad_mode": "forward"} else 3)


@each_way
def test_loss_11_a_lora_adapter_is_part_of_the_weight(draw, way):
    inputs = draw(20, 31, 13)
    hidden, frozen, labels = inputs["hidden"], inputs["weight"], inputs["labels"]
    torch.manual_seed(1)
    down, up = torch.randn(4, 13, dtype=torch.float64), torch.randn(31, 4, dtype=torch.float64)
    adapter = [down.requires_grad_(), up.requires_grad_()]
    loss = linear_cross_entropy(hidden, frozen + up @ down, labels, **way).sum()
    same = {k: v for k, v in way.items() if k != "grad_mode"}
    right = reference.linear_cross_entropy(hidden, frozen + up @ down, labels, **same).sum()
    torch.testing.assert_close(loss, right, rtol=1e-12, atol=0)
    grads, right_grads = torch.autograd.grad(loss, adapter), torch.autograd.grad(right, adapter)
    torch.testing.assert_close(grads, right_grads, rtol=1e-11, atol=1e-12)
    assert all(grad.any() for grad in grads)


@each_way
def test_loss_12_autocast_gives_gradients_in_the_parameter_s_dtype(draw, gradients, recorder, bf16_products, way):
    with recorder, torch.autocast("cpu", torch.bfloat16):
        loss, grads = gradients(linear_cross_entropy, draw(20, 31, 16, dtype=torch.float32), **way)
    assert {loss.dtype, *(grad.dtype for grad in grads.values())} == {torch.float32}
    assert set(recorder.products) == {bf16_products}


@each_way
def test_loss_13_the_softcap_comes_after_the_logit_scale(draw, gradients, way):
    inputs = draw(20, 31, 13, ignored=0.0)
    loss, grads = gradients(linear_cross_entropy, inputs, softcap=2.0, logit_scale=0.5, **way)
    same = {"reduction": way.get("reduction", "mean")}

    def spelled_out(hidden, weight, labels, bias):
        return F.cross_entropy(2.0 * torch.tanh(0.5 * F.linear(hidden, weight, bias) / 2.0), labels, **same)

    right, right_grads = gradients(spelled_out, inputs)
    torch.testing.assert_close(loss, right, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(grads, right_grads, rtol=1e-11, atol=1e-13)


@each_grad_mode
def test_loss_14_label_smoothing_is_over_valid_rows_only(tiny, grad_mode):
    hidden, weight, labels = tiny
    loss = linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1, grad_mode=grad_mode)
    assert loss.item() == pytest.approx(5.00290302, rel=1e-8)
    valid = linear_cross_entropy(hidden[1:], weight, labels[1:], label_smoothing=0.1, grad_mode=grad_mode)
    assert loss.item() == valid.item()


@each_way
def test_loss_15_z_loss_off_adds_exactly_nothing(gradients, way):
    # lse ** 2 is inf in fp32 here, and 0 * inf would be NaN in the loss and in the gradient.
    inputs = {"hidden": torch.full((1, 1), 1e20), "weight": torch.ones(2, 1), "labels": torch.tensor([0])}
    loss, grads = gradients(linear_cross_entropy, inputs, z_loss=0.0, **way)
    torch.testing.assert_close(loss.squeeze(), torch.tensor(2.0).log())
    torch.testing.assert_close(grads["weight"], torch.tensor([[-0.5e20], [0.5e20]]))


@each_way
def test_loss_20_tied_embeddings_get_both_gradients(way):
    torch.manual_seed(0)
    table = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    loss = linear_cross_entropy(table[torch.tensor([1, 2, 3])], table, torch.tensor([4, 5, 6]), **way)
    loss.mean().backward()
    assert table.grad.norm().item() == pytest.approx(4.12263, abs=5e-6)


def test_loss_21_accuracy_and_log_probabilities_without_logits(tiny):
    statistics = token_statistics(*tiny)
    assert statistics.accuracy.item() == pytest.approx(0.2)
    assert statistics.log_probs.sum().item() == pytest.approx(-25.38421756, rel=1e-8)
    assert statistics.log_probs[0] == 0
    assert 1e-4 * (statistics.logsumexp**2).sum().item() / 5 == pytest.approx(1.7148162e-3, rel=1e-7)
