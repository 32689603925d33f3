"""A step leaves no trace, also when it ends in an error."""

import copy
import random
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from ac_core import ActivationCheckpointingError
from ac_core.proof.restore import Before, restored, same_bits


class Busy(nn.Module):
    """Changes everything that a forward may change."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("lazy", None)
        self.register_buffer("replaced", torch.zeros(2))
        self.calls, self.mask, self.seen = 0, None, torch.zeros(4)
        self.cached = [1]
        self.generator = torch.Generator()

    def forward(self, x):
        self.calls += 1
        self.mask = torch.ones(4)
        self.seen += 1
        self.lazy = x.detach()
        self.replaced = torch.ones(2)
        self.register_buffer("added", torch.ones(1))
        self.flag = True
        noise = torch.rand(4, generator=self.generator) * random.random()
        return self.dropout(self.norm(self.linear(x))) * self.mask + noise


@pytest.fixture
def busy():
    torch.manual_seed(0)
    model = Busy()
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    model.linear.bias.grad = None
    return model


def snapshot(model):
    state = {name: copy.copy(value) for name, value in vars(model).items() if name[0] != "_" and name != "generator"}
    buffers = {name: (id(value), copy.deepcopy(value)) for name, value in model.named_buffers()}
    gradients = {name: (id(p.grad), copy.deepcopy(p.grad)) for name, p in model.named_parameters()}
    generators = (torch.get_rng_state(), random.getstate(), model.generator.get_state())
    return repr((state, buffers, gradients, [g.tolist() if hasattr(g, "tolist") else g for g in generators]))


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(busy, fails):
    before = snapshot(busy)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), restored(busy):
        assert busy.linear.weight.grad is None
        busy(torch.randn(5, 4)).sum().backward()
        assert snapshot(busy) != before
        if fails:
            raise ZeroDivisionError
    assert snapshot(busy) == before
    assert [name for name, _ in busy.named_buffers(recurse=False)] == ["replaced"]
    assert busy.cached == [1]


def test_numpys_generator_is_put_back(busy):
    numpy = pytest.importorskip("numpy")
    numpy.random.seed(5)
    with restored(busy):
        first = numpy.random.rand()
    assert numpy.random.rand() == first


def test_the_changes_of_a_step(busy):
    before = Before(busy)
    busy(torch.randn(5, 4))
    changed = before.changes()
    assert changed["calls"] == 1
    assert changed["norm.num_batches_tracked"] == 1
    assert {"mask", "seen", "flag", "lazy", "added", "replaced"} <= changed.keys()
    assert "training" not in changed
    assert "norm.training" not in changed


def test_gradients_that_are_views_keep_their_values(busy):
    """As DDP's are with gradient_as_bucket_view: the step writes into the same memory."""
    bucket = torch.full((16,), 2.0)
    busy.linear.weight.grad = view = bucket.view(4, 4)
    with restored(busy):
        bucket.zero_()
    assert busy.linear.weight.grad is view
    assert bucket.eq(2).all()


def test_a_step_that_changes_a_parameter_is_told():
    model = nn.Embedding(4, 4, max_norm=0.1)
    with pytest.raises(ActivationCheckpointingError, match=r"parameter 'weight' was changed in place"), restored(model):
        model(torch.tensor([1]))


def test_an_error_of_the_step_is_not_replaced_by_another():
    model = nn.Embedding(4, 4, max_norm=0.1)

    def fail():
        with restored(model):
            model(torch.tensor([1]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_a_buffer_that_did_not_change_is_not_written(busy):
    version = busy.norm.running_mean._version
    with restored(busy):
        pass
    assert busy.norm.running_mean._version == version


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), True),
        (torch.tensor(0.0), torch.tensor(-0.0), False),
        (torch.tensor([1]), torch.tensor([1.0]), False),
        (torch.ones(2), torch.ones(2, 1), False),
        (torch.ones(0), torch.ones(0), True),
        (torch.ones(3, 2).t(), torch.ones(2, 3), True),
        (torch.tensor([True]), torch.tensor([True]), True),
        (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64), True),
        (torch.ones(2).to_sparse(), torch.ones(2).to_sparse(), True),
    ],
)
def test_same_bits(left, right, same):
    assert same_bits(left, right) is same
