import itertools

import pytest
import torch

from ac_loss._objective import Objective


def spelled_out(x, labels, *, scale, softcap, smoothing, z):
    """The docstring's formula, one token at a time."""
    losses = []
    for row, label in zip(x, labels.tolist(), strict=True):
        s = softcap * torch.tanh(scale * row / softcap) if softcap else scale * row
        lse = torch.log(torch.exp(s).sum())
        losses.append((1 - smoothing) * (lse - s[label]) + smoothing * (lse - s.mean()) + z * lse**2)
    return torch.stack(losses)


@pytest.mark.parametrize(
    ("scale", "softcap", "smoothing", "z"),
    list(itertools.product([1.0, 0.3], [None, 1.5], [0.0, 0.2, 1.0], [0.0, 0.3])),
)
def test_losses_and_gradient_are_the_formula_s(scale, softcap, smoothing, z):
    torch.manual_seed(0)
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    labels, bias, weight = torch.randint(0, 7, (5,)), torch.randn(7, dtype=torch.float64), torch.randn(5).double()
    right = spelled_out(x + bias, labels, scale=scale, softcap=softcap, smoothing=smoothing, z=z)
    (gradient,) = torch.autograd.grad((right * weight).sum(), x)

    work = x.detach().clone()
    objective = Objective(logit_scale=scale, softcap=softcap, label_smoothing=smoothing, z_loss=z)
    torch.testing.assert_close(objective.evaluate_(work, labels, bias, weight), right.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(work, gradient, rtol=1e-12, atol=1e-12)
    losses = objective.evaluate_(x.detach().clone(), labels, bias, None)
    torch.testing.assert_close(losses, right.detach(), rtol=1e-12, atol=1e-12)


def test_a_large_common_offset_keeps_the_loss():
    # lse - s[y] on the absolute values is 0 here in fp32.
    losses = Objective().evaluate_(torch.full((1, 2), 1e8), torch.tensor([0]), None, None)
    torch.testing.assert_close(losses, torch.tensor([2.0]).log())


def test_masked_classes_get_no_gradient():
    x = torch.tensor([[0.0, 1.0, float("-inf")]])
    losses = Objective().evaluate_(x, torch.tensor([1]), None, 1.0)
    torch.testing.assert_close(losses, torch.tensor([0.31326166]))
    torch.testing.assert_close(x, torch.tensor([[0.26894143, -0.26894143, 0.0]]))


def test_z_loss_off_adds_exactly_nothing():
    # lse ** 2 is inf in fp32 here, and 0 * inf would be NaN in the loss and in the gradient.
    x = torch.full((1, 2), 1e20)
    losses = Objective(z_loss=0.0).evaluate_(x, torch.tensor([0]), None, 1.0)
    torch.testing.assert_close(losses, torch.tensor([2.0]).log())
    torch.testing.assert_close(x, torch.tensor([[-0.5, 0.5]]))
