"""A kept call that changes its input in place is made again: the recompute's input has to be changed as well."""

import pytest
import torch
from torch import nn

from ac_core import ActivationCheckpointingConfig, apply_activation_checkpointing


class Doubles(nn.Module):
    """Changes its input, and does not return it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        x.mul_(2.0)
        return self.second(self.first(x).relu())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.inner = Doubles()
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        h = self.norm(x)
        y = self.inner(h)
        return x + self.last((h + y).sigmoid()).sigmoid()


@pytest.mark.parametrize("save", [None, ("inner",), ("matmul",)])
def test_gradients_are_those_without_checkpointing(save):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    x = torch.randn(4, 8)

    def gradients():
        model.zero_grad(set_to_none=True)
        model(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    config = ActivationCheckpointingConfig(policy="selective", save=save)
    apply_activation_checkpointing(model, config, blocks=Block)
    for _ in range(3):  # the calls are kept one by one in the first step, and `inner` as a whole from the second on
        assert all(map(torch.equal, gradients(), expected))


def test_an_input_that_was_made_in_inference_mode_has_no_version_and_is_none_the_worse():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, scale):
            return self.linear(x) + scale

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = Scaled(), nn.Linear(8, 8)

        def forward(self, x):
            with torch.inference_mode():
                scale = torch.full((8,), 2.0)
            return x + self.last(self.inner(x, scale).sigmoid()).sigmoid()

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    x = torch.randn(4, 8)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    config = ActivationCheckpointingConfig(policy="selective", save=("inner",))
    apply_activation_checkpointing(model, config, blocks=Block)
    for _ in range(2):
        assert all(map(torch.equal, torch.autograd.grad(model(x).sum(), list(model.parameters())), expected))
