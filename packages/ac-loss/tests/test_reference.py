import pytest
import torch
import torch.nn.functional as F

from ac_loss import reference


@pytest.fixture
def tiny():
    """The inputs of cases/loss.md, drawn in its order."""
    torch.manual_seed(0)
    hidden = torch.randn(6, 8, dtype=torch.float64)
    weight = torch.randn(11, 8, dtype=torch.float64)
    labels = torch.randint(0, 11, (6,))
    labels[0] = -100
    return hidden, weight, labels


@pytest.mark.parametrize(
    ("options", "right"),
    [
        ({}, 5.07684351),
        ({"reduction": "sum"}, 25.38421756),
        ({"reduction": "sum", "num_label_tokens": 20}, 1.26921088),
        ({"reduction": "mean", "num_label_tokens": torch.tensor(20)}, 1.26921088),
        ({"softcap": 2.0}, 3.28356095),
        ({"label_smoothing": 0.1}, 5.00290302),
        ({"z_loss": 1e-4}, 5.07684351 + 1.7148162e-3),
    ],
)
def test_right_values(tiny, options, right):
    assert reference.linear_cross_entropy(*tiny, **options).item() == pytest.approx(right, rel=1e-8)


def test_is_torch_s_cross_entropy(tiny):
    hidden, weight, labels = tiny
    bias = torch.linspace(-1, 1, 11, dtype=torch.float64)
    for reduction in ("none", "sum", "mean"):
        right = F.cross_entropy(F.linear(hidden, weight, bias), labels, reduction=reduction, label_smoothing=0.3)
        loss = reference.linear_cross_entropy(*tiny, bias=bias, reduction=reduction, label_smoothing=0.3)
        torch.testing.assert_close(loss, right, rtol=1e-14, atol=0)


def test_logits_are_fp32_for_narrow_inputs(tiny):
    hidden, weight, labels = (t.bfloat16() if t.is_floating_point() else t for t in tiny)
    loss = reference.linear_cross_entropy(hidden, weight, labels)
    assert loss.dtype == torch.float32
    assert loss.item() == reference.linear_cross_entropy(hidden.float(), weight.float(), labels).item()


def test_nothing_counts(tiny):
    hidden, weight, labels = tiny
    weight.requires_grad_()
    loss = reference.linear_cross_entropy(hidden, weight, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0.0
    assert not weight.grad.any()
