"""How a batch is passed, where the backward starts, and what of the output is kept until then."""

import gc
import weakref
from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from ac_core import ActivationCheckpointingError
from ac_core.proof.step import check_model, copy_batch, run_forward

Pair = namedtuple("Pair", "x scale")


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class Model(nn.Module):
    """Returns whatever `make` makes of its two tensors."""

    def __init__(self, make=lambda y, z: y):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 2)
        self.make = make

    def forward(self, x, scale=1.0):
        return self.make(self.first(x) * scale, self.second(x))


X = torch.arange(8.0).reshape(2, 4)


def gradients(model, batch, loss=None):
    model.zero_grad(set_to_none=True)
    forward, values = run_forward(model, batch, loss)
    forward.backward()
    return values, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", [dict, UserDict], ids=["dict", "a tokenizer's output"])
def test_a_mapping_is_keyword_arguments(kind):
    values, _ = gradients(Model(), kind({"x": X, "scale": 0.0}))
    assert values["output"].abs().sum() == 0


@pytest.mark.parametrize("batch", [(X, 0.0), [X, 0.0], Pair(X, 0.0)])
def test_a_sequence_is_positional_arguments(batch):
    values, _ = gradients(Model(), copy_batch(batch))
    assert values["output"].abs().sum() == 0


@pytest.mark.parametrize("batch", [None, 3, "text", {1, 2}])
def test_any_other_batch_is_refused(batch):
    with pytest.raises(TypeError, match=r"batch: \w+ is not a mapping of keyword arguments"):
        run_forward(Model(), batch, None)


@pytest.mark.parametrize(
    ("make", "starts"),
    [
        (lambda y, z: y.mean(), ["loss"]),
        (lambda y, z: {"loss": y.mean(), "logits": z}, ["loss"]),
        (lambda y, z: Output(z, y.mean()), ["loss"]),
        (lambda y, z: Output(y), ["output.logits"]),
        (lambda y, z: y, ["output"]),
        (lambda y, z: (y, [y.detach(), y.argmax()], None), ["output.0"]),
        (lambda y, z: {"a": y, "b": {"c": y * 2}}, ["output.a", "output.b.c"]),
    ],
)
def test_what_the_backward_starts_from(make, starts):
    values, grads = gradients(Model(make), X)
    assert list(values) == starts
    assert sorted(grads) == ["first.bias", "first.weight"]


def test_loss_comes_before_all_else():
    values, grads = gradients(Model(lambda y, z: Output(z, y.mean())), X, loss=lambda output: output.logits.mean())
    assert list(values) == ["loss"]
    assert sorted(grads) == ["second.bias", "second.weight"]


def test_a_loss_that_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match=r"loss: it returned float, not a tensor"):
        run_forward(Model(), X, lambda output: output.sum().item())


@pytest.mark.parametrize("make", [lambda y, z: y.mean(), lambda y, z: (y, z), lambda y, z: "text"])
def test_nothing_that_needs_a_gradient_is_an_error(make):
    with pytest.raises(ActivationCheckpointingError, match="there is nothing to differentiate"):
        run_forward(Model(make).requires_grad_(False), X, None)


def test_gradients_of_a_loss_are_those_of_backward():
    model = Model(lambda y, z: y.square().mean())
    model(X).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    _, got = gradients(model, X)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_a_model_that_ends_in_a_norm_has_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    _, got = gradients(model, X)
    assert got["0.weight"].abs().max() > 1e-2  # of the sum over the output: 1e-7, rounding


def test_the_output_is_not_kept():
    seen = []
    model = Model()
    model.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    forward, _ = run_forward(model, X, None)
    del _
    gc.collect()
    assert seen[0]() is None
    forward.backward()
    assert model.first.weight.grad is not None


def test_a_forward_under_no_grad_has_gradients_all_the_same():
    with torch.no_grad():
        _, got = gradients(Model(), X)
    assert sorted(got) == ["first.bias", "first.weight"]


def test_a_model_that_the_first_forward_would_change_is_refused():
    with pytest.raises(ActivationCheckpointingError, match=r"parameter '0.weight' has no shape before the first"):
        check_model(nn.Sequential(nn.LazyLinear(4)))


def test_a_copy_of_a_batch():
    ids, hidden = torch.arange(3), (torch.ones(2, requires_grad=True) * 2)
    batch = {"ids": ids, "labels": ids, "nested": [hidden, (ids, None)], "flag": True}
    copy = copy_batch(UserDict(batch))
    assert copy["labels"] is copy["ids"] is copy["nested"][1][0]
    assert copy["ids"] is not ids
    assert copy["ids"].data_ptr() != ids.data_ptr()
    assert copy["nested"][0].is_leaf
    assert copy["nested"][0].requires_grad
    assert copy["flag"] is True
    assert isinstance(copy_batch((ids, [ids])), tuple)
    assert torch.equal(copy_batch(ids), ids)
