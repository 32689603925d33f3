"""A module that leaves something behind besides its result is not jumped over in a recompute."""

import pytest
import torch
from torch import nn

from ac_core import ActivationCheckpointingConfig, ActivationCheckpointingError, apply_activation_checkpointing


class Leaves(nn.Module):
    """Puts what the block reads later into an attribute, or into a buffer."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.where = where
        self.register_buffer("seen", torch.zeros(4, 8) if where == "buffer" else None)

    def forward(self, x):
        hidden = self.first(x)
        if self.where == "attribute":
            self.hidden = hidden
        else:
            self.seen.copy_(hidden.detach())
        return self.second(hidden.relu())


class Block(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.inner = Leaves(where)
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        y = self.inner(self.norm(x))
        left = self.inner.hidden if self.inner.where == "attribute" else self.inner.seen.clone()
        return x + self.last((left * y).sigmoid()).sigmoid()


def model_of(where: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(where), Block(where))


@pytest.mark.parametrize("where", ["attribute", "buffer"])
@pytest.mark.parametrize("save", [None, ("matmul",)])
def test_gradients_are_those_without_checkpointing(where, save):
    model = model_of(where)

    def gradients():
        torch.manual_seed(1)
        model.zero_grad(set_to_none=True)
        # Two forwards before the backward: what the first has left is gone by then.
        losses = [model(torch.randn(4, 8)).square().sum() for _ in range(2)]
        torch.stack(losses).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    config = ActivationCheckpointingConfig(policy="selective", save=save)
    apply_activation_checkpointing(model, config, blocks=Block)
    for _ in range(3):
        assert all(map(torch.equal, gradients(), expected))


@pytest.mark.parametrize(("where", "name"), [("attribute", "hidden"), ("buffer", "seen")])
def test_one_that_save_names_is_refused(where, name):
    model = model_of(where)
    config = ActivationCheckpointingConfig(policy="selective", save=("inner",))
    apply_activation_checkpointing(model, config, blocks=Block)
    with pytest.raises(ActivationCheckpointingError, match=rf"save: 'inner' changes .*{name}"):
        model(torch.randn(4, 8))
