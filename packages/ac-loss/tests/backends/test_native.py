"""What is refused of torch's own function is refused for these defects. A test that fails here is good news."""

import pytest
import torch
import torch.nn.functional as F

from ac_loss import linear_cross_entropy
from ac_loss.backends import native

pytestmark = pytest.mark.skipif(not native._parameters(), reason="this torch has no chunked F.linear_cross_entropy")


def call(hidden, weight, labels, **options):
    return F.linear_cross_entropy(hidden, weight, labels, options=torch.nn.LinearCrossEntropyOptions(), **options)


def relative_error(got, right):
    return ((got.double() - right).norm() / right.norm()).item()


def test_what_it_computes(ask):
    assert native.objections(ask(torch.float32)) == native.objections(ask(torch.float64, accum="param")) == []
    assert native.objections(ask(bias_dtype=torch.float32, grad_bias=True)) == []


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"softcap": 3.0}, "softcap"),
        ({"z_loss": 0.1}, "z_loss"),
        ({"label_smoothing": 0.1}, "label_smoothing"),
        ({"logit_scale": 2.0}, "logit_scale"),
        ({"reduction": "none"}, "reduction"),
        ({"accum": "main_grad"}, "main_grad"),
        ({"grad_mode": "recompute"}, "grad_mode"),
        ({"dtype": torch.bfloat16}, "bfloat16"),
        ({"dtype": torch.float16}, "float16"),
    ],
)
def test_what_it_refuses(ask, facts, word):
    (objection,) = native.objections(ask(**facts))
    assert word in objection


def test_without_the_function(ask, monkeypatch):
    monkeypatch.delattr(F, "linear_cross_entropy")
    (objection,) = native.objections(ask())
    assert "has no F.linear_cross_entropy" in objection


def test_bf16_losses_are_summed_in_bf16(draw):
    inputs = draw(8192, 512, 8, dtype=torch.bfloat16, ignored=0.0)
    hidden, weight, labels = (inputs[k] for k in ("hidden", "weight", "labels"))
    right = F.cross_entropy(F.linear(hidden, weight).float(), labels)
    loss = call(hidden, weight, labels)
    assert loss.dtype == torch.bfloat16
    assert abs(loss.item() - right.item()) > 0.01 * right.item()


def test_bf16_weight_gradients_are_summed_in_bf16(draw, gradients):
    inputs = draw(4096, 2048, 16, dtype=torch.bfloat16, ignored=0.0)
    del inputs["bias"]
    wide = {k: v.double() if k != "labels" else v for k, v in inputs.items()}
    plain = lambda hidden, weight, labels: F.cross_entropy(F.linear(hidden, weight), labels)  # noqa: E731
    right = gradients(plain, wide)[1]["weight"]
    errors = [relative_error(gradients(function, inputs)[1]["weight"], right) for function in (call, plain)]
    assert errors[0] > 2 * errors[1]


def test_fp16_gradients_are_rounded_before_the_loss_scale(draw, gradients):
    inputs = draw(2000, 4001, 8, dtype=torch.float16, ignored=0.0)
    inputs["labels"].clamp_(max=1999)
    inputs["weight"] *= 0.1
    del inputs["bias"]
    wide = {k: v.double() if k != "labels" else v for k, v in inputs.items()}
    plain = lambda hidden, weight, labels: F.cross_entropy(F.linear(hidden, weight), labels)  # noqa: E731
    right = gradients(plain, wide, 2.0**14)[1]["weight"]
    grad = gradients(call, inputs, 2.0**14)[1]["weight"]
    # Classes that are nobody's label: less than fp16 can hold before it is scaled.
    assert relative_error(grad[2000:], right[2000:]) > 0.01


def test_with_every_label_ignored_gradients_are_nan(draw, gradients):
    inputs = draw(6, 11, 8, dtype=torch.float32, ignored=1.1)
    del inputs["bias"]
    _, grads = gradients(call, inputs)
    assert grads["hidden"].isnan().any()


def test_a_nan_row_that_is_ignored_spoils_the_loss(draw):
    inputs = draw(6, 11, 8, dtype=torch.float32, ignored=0.0)
    inputs["labels"][0], inputs["hidden"][0] = -100, float("nan")
    assert call(inputs["hidden"], inputs["weight"], inputs["labels"]).isnan()


def test_a_second_backward_is_an_error(draw):
    inputs = draw(6, 11, 8, dtype=torch.float32)
    loss = call(inputs["hidden"].requires_grad_(), inputs["weight"], inputs["labels"])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="called twice"):
        loss.backward()


def test_label_smoothing_makes_all_logits(draw, recorder):
    inputs = draw(2048, 501, 8, dtype=torch.float32)
    with recorder, pytest.warns(UserWarning, match="``options`` ignored"):
        call(inputs["hidden"], inputs["weight"], inputs["labels"], label_smoothing=0.1)
    assert recorder.largest == 2048 * 501


def test_the_estimate_is_what_it_holds(draw, peak_bytes, ask):
    inputs = draw(1000, 8001, 64, dtype=torch.float32, ignored=0.0)
    del inputs["bias"]
    estimate = native.extra_bytes(ask())
    assert peak_bytes(linear_cross_entropy, inputs, backend="native") == pytest.approx(estimate, rel=0.1)
