from types import SimpleNamespace

import torch
from torch import Tensor, nn

from tools.bench.meter import compare_gradients, gradients, step_memory, train_step

ROWS, WIDTH = 64, 32
BYTES = ROWS * WIDTH * 4


class Squares(nn.Module):
    """Keeps two tensors of `BYTES` for backward beside its input, and a scalar loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> SimpleNamespace:
        scaled = x * self.scale
        return SimpleNamespace(loss=(scaled.exp() * scaled).sum())


def test_held_is_what_backward_needs_and_peak_is_more():
    model = Squares()
    memory = step_memory(model, {"x": torch.ones(ROWS, WIDTH)})
    assert 2 * BYTES <= memory.held <= 2 * BYTES + 1024  # the loss, and its alignment
    assert memory.peak >= memory.held + BYTES


def test_gradients_of_the_step_before_do_not_count():
    model, batch = Squares(), {"x": torch.ones(ROWS, WIDTH)}
    first = step_memory(model, batch)
    train_step(model, batch)
    assert step_memory(model, batch) == first


def test_one_differing_gradient_is_told():
    model, batch = Squares(), {"x": torch.ones(ROWS, WIDTH)}
    train_step(model, batch)
    expected = gradients(model)
    train_step(model, batch)
    assert compare_gradients(gradients(model), expected) == "equal"
    with torch.no_grad():
        model.scale.grad[0] *= 1.5
    assert compare_gradients(gradients(model), expected) == "differ by 5.0e-01"
