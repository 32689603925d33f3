import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ac_core.errors import ActivationCheckpointingError
from ac_core.selective.saved import CallSaves, hand_to_region


def kept(function, *inputs):
    """`function(*inputs)` as a kept call; what it saved of its inputs is handed over."""
    saves = CallSaves(list(inputs))
    with saves.hooks():
        result = function(*inputs)
    return result, saves.hand_over(), saves


def test_inputs_are_handed_over_and_the_rest_is_held():
    x = torch.randn(4, 8, requires_grad=True) * 1
    y = torch.randn(4, 8, requires_grad=True) * 1
    result, handed, saves = kept(lambda a, b: (a * b).exp(), x, y)
    assert set(handed) == {0, 1}
    assert sum(saves.held.values()) == result.numel() * 4  # exp saves its result
    plain = torch.autograd.grad((x * y).exp().sum(), (x, y))
    assert all(map(torch.equal, torch.autograd.grad(result.sum(), (x, y)), plain))


def test_parameters_are_neither_held_nor_handed():
    weight, bias = torch.nn.Parameter(torch.randn(8, 8)), torch.nn.Parameter(torch.randn(8))
    x = torch.randn(4, 8)
    _, handed, saves = kept(lambda a: torch.nn.functional.linear(a, weight), x)
    assert handed == (0,)
    assert saves.held == {}
    _, _, saves = kept(lambda a: torch.addmm(bias, a, weight.t()), x)  # saves the view of the weight
    assert saves.held == {}


def test_a_view_of_an_input_comes_back_as_that_view():
    x = torch.randn(4, 8, requires_grad=True) * 1
    result, handed, _ = kept(lambda a: a.t()[2:].sin(), x)
    assert handed == (0,)
    assert torch.equal(torch.autograd.grad(result.sum(), x)[0], torch.autograd.grad(x.t()[2:].sin().sum(), x)[0])


def test_a_held_tensor_that_was_changed_in_place_is_an_error():
    x = torch.randn(4, requires_grad=True)
    result, _, _ = kept(torch.exp, x)
    with torch.no_grad():
        result.add_(1)
    with pytest.raises(ActivationCheckpointingError, match="modified in place"):
        result.sum().backward()


def test_what_is_handed_to_a_region_is_not_kept_alive():
    alive = []

    def block(x):
        y = x * 2
        alive.append(weakref.ref(y))
        hand_to_region(y)
        return (y * y).sum()

    out = checkpoint(block, torch.randn(4, requires_grad=True), use_reentrant=False)
    gc.collect()
    assert alive[0]() is None
    out.backward()
