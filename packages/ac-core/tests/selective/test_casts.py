"""Under autocast a kept call keeps its output alone: the casts that it makes are made again from what they are of."""

import pytest
import torch
from torch import nn

from ac_core import ActivationCheckpointingConfig, apply_activation_checkpointing, remove_activation_checkpointing


class Shared(nn.Module):
    """A block that uses one matrix twice: under autocast both uses share one cast of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.inner = nn.Linear(16, 16, bias=False)
        self.outer = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.outer(self.inner(self.inner(self.norm(x)).sigmoid()).sigmoid()).sigmoid()


@pytest.mark.parametrize("save", [None, ("matmul",), ("inner",)])
@pytest.mark.parametrize("cache_enabled", [True, False])
def test_results_are_those_without_checkpointing(save, cache_enabled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Shared(), Shared())
    config = ActivationCheckpointingConfig(policy="selective", save=save)

    def steps():
        results = []
        for seed in range(3):  # it learns in the first and settles in the second
            torch.manual_seed(seed)
            model.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled):
                loss = model(torch.randn(6, 16)).square().sum()
            loss.backward()
            results += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        return results

    expected = steps()
    apply_activation_checkpointing(model, config, blocks=Shared)
    assert all(map(torch.equal, steps(), expected))


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_only_outputs_are_kept(stack, saved_bytes, parameters):
    model = stack(depth=4).to(parameters)

    def bytes_of(policy):
        apply_activation_checkpointing(model, policy)
        # Without its cache: that holds a cast of every weight until autocast ends, whatever the policy.
        with torch.autocast("cpu", torch.bfloat16, parameters == torch.float32, cache_enabled=False):
            measured = [saved_bytes(model) for _ in range(3)]
        remove_activation_checkpointing(model)
        return measured[-1]

    output_of_up = 2 * 12 * 32 * 2  # [batch, sequence, width] of two bytes each
    assert bytes_of("selective") == bytes_of("full") + 4 * output_of_up


def test_the_cast_of_an_input_that_the_call_changes_later_is_kept():
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            y = self.linear(x)  # saves a cast of x, which is none the worse for what follows
            return y + x.mul_(2.0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner, self.last = nn.LayerNorm(16), Changes(), nn.Linear(16, 16)

        def forward(self, x):
            h = self.norm(x)
            return x + self.last((self.inner(h) + h).sigmoid()).sigmoid()

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    x = torch.randn(6, 16)

    def gradients():
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            model(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    config = ActivationCheckpointingConfig(policy="selective", save=("inner",))
    apply_activation_checkpointing(model, config, blocks=Block)
    for _ in range(3):
        assert all(map(torch.equal, gradients(), expected))
