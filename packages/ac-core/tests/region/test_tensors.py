"""Buffers are those of the run without checkpointing, and the recompute sees them as the forward did."""

import copy

import pytest
import torch
from torch import nn

from ac_core import ActivationCheckpointingError, apply_activation_checkpointing


class NormBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class MovingAverageBlock(nn.Module):
    """Scales by a buffer that it then changes: the recompute needs the value before."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("first", None)
        self.register_buffer("constant", torch.ones(1000))

    def forward(self, x):
        y = x + self.down(self.up(x).sin()) * self.scale.clone()
        if self.first is None:
            self.first = y.detach().mean()
            y = y * 2
        self.scale.mul_(0.5).add_(y.detach().abs().mean())
        return y * self.constant[0]


def build(kind):
    torch.manual_seed(0)
    return nn.Sequential(kind(), kind())


def run(model, backwards=1, steps=3):
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(5, 8)).square().mean()
        for _ in range(backwards):
            loss.backward(retain_graph=True)
    return {**dict(model.named_buffers()), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("kind", [NormBlock, MovingAverageBlock])
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_buffers_and_gradients_are_those_without_checkpointing(kind, backwards, mode):
    plain, model = build(kind), build(kind)
    apply_activation_checkpointing(model)
    expected, got = (run(getattr(m, mode)(), backwards) for m in (plain, model))
    assert expected.keys() == got.keys()
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


def test_a_batch_norm_that_begins_to_train_later():
    plain, model = build(NormBlock), build(NormBlock)
    apply_activation_checkpointing(model)
    for m in (plain, model):
        run(m.eval(), steps=1)
        run(m.train())
    assert torch.equal(plain[1].norm.running_mean, model[1].norm.running_mean)
    assert torch.equal(plain[1].norm.num_batches_tracked, model[1].norm.num_batches_tracked)


def test_a_buffer_object_keeps_its_identity():
    model = build(NormBlock)
    before = model[0].norm.running_mean
    apply_activation_checkpointing(model)
    run(model)
    assert model[0].norm.running_mean is before


def test_a_copy_has_its_own_buffers():
    model = build(NormBlock)
    apply_activation_checkpointing(model)
    twin = copy.deepcopy(model)
    run(twin)
    assert model[0].norm.num_batches_tracked == 0
    assert twin[0].norm.num_batches_tracked == 3


class Late(nn.Module):
    """Writes a matrix buffer in place, or puts another one in, from its third forward on."""

    def __init__(self, replace):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("mask", torch.eye(8))
        self.register_buffer("forwards", torch.zeros(()))
        self.replace = replace

    def forward(self, x):
        self.forwards.add_(1)
        y = x + self.down(self.up(x).sin()) @ self.mask.clone()
        if self.forwards > 2:
            if self.replace:
                self.mask = self.mask * 0.5
            else:
                self.mask.mul_(0.5)
        return y


def test_a_buffer_that_is_replaced_later_is_exact():
    plain, model = (nn.Sequential(Late(True), Late(True)) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    apply_activation_checkpointing(model)
    expected, got = run(plain, steps=4), run(model, steps=4)
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


def test_a_buffer_that_begins_to_change_in_place_later_is_an_error_and_not_a_guess():
    model = nn.Sequential(Late(False), Late(False))
    apply_activation_checkpointing(model)
    with pytest.raises(ActivationCheckpointingError, match=r"buffer 'mask' of block '0' was changed in place"):
        run(model, steps=4)


def test_one_buffer_under_two_names_stays_one():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
            self.writer, self.reader = nn.Module(), nn.Module()
            step = torch.ones(())
            self.writer.register_buffer("step", step)
            self.reader.register_buffer("step", step)

        def forward(self, x):
            self.writer.step.add_(1)
            return x + self.down(self.up(x).sin()) * self.reader.step.clone()

    plain, model = build(Shared), build(Shared)
    apply_activation_checkpointing(model)
    expected, got = run(plain), run(model)
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


def test_a_functional_batch_norm_whose_first_forward_was_in_eval():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("var", torch.ones(8))

        def forward(self, x):
            normed = nn.functional.batch_norm(x, self.mean, self.var, training=self.training)
            return x + self.down(self.up(normed).relu())

    plain, model = build(Functional), build(Functional)
    apply_activation_checkpointing(model)
    for m in (plain, model):
        run(m.eval(), steps=1)
    expected, got = run(plain.train()), run(model.train())
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
