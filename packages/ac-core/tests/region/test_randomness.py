"""Random numbers: a recompute draws those of its forward, and leaves each generator where the forward left it."""

import random

import pytest
import torch
from torch import nn

from ac_core import apply_activation_checkpointing
from ac_core.region import randomness
from ac_core.region.randomness import ReplayedRandomness, Source

numpy = pytest.importorskip("numpy")


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.begin()

    def begin(self):
        pass

    def forward(self, x):
        return x + self.down((self.up(x) * self.draw()).sin())


class OfTorch(Noisy):
    def draw(self):
        return torch.rand(16)


class OfPython(Noisy):
    def draw(self):
        return random.random()


class OfNumpy(Noisy):
    def draw(self):
        return float(numpy.random.rand())


class OwnOfTorch(Noisy):
    def begin(self):
        self.generator = torch.Generator().manual_seed(3)

    def draw(self):
        return torch.rand(16, generator=self.generator)


class OwnOfPython(Noisy):
    def begin(self):
        self.several = {"one": random.Random(3)}

    def draw(self):
        return self.several["one"].random()


class OwnOfNumpy(Noisy):
    def begin(self):
        self.new, self.old = numpy.random.default_rng(3), numpy.random.RandomState(3)

    def draw(self):
        return float(self.new.random() + self.old.rand())


def build(kind):
    torch.manual_seed(0)
    return nn.Sequential(kind(), kind())


def run(model, backwards):
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(5)
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        for _ in range(backwards):
            loss.backward(retain_graph=True)
    after = [torch.rand(()).item(), random.random(), numpy.random.rand(), *(torch.as_tensor(b.draw()) for b in model)]
    return [p.grad for p in model.parameters()] + [torch.as_tensor(a) for a in after]


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("kind", Noisy.__subclasses__(), ids=lambda kind: kind.__name__)
def test_the_same_numbers_and_the_same_state_after(kind, backwards):
    plain, model = build(kind), build(kind)
    apply_activation_checkpointing(model)
    assert all(map(torch.equal, run(plain, backwards), run(model, backwards)))


def test_pythons_and_numpys_are_watched_only_where_the_code_of_a_block_names_them():
    named = randomness.named_in_files_of
    assert named(OfPython) == {"random", "numpy"}
    assert named(nn.Linear) == named(nn.TransformerEncoderLayer) == frozenset()


class Device:
    """A generator of a device: a counter."""

    state = 0

    def draw(self):
        self.state += 1
        return self.state


def test_the_generator_of_a_device_that_no_input_lies_on(monkeypatch):
    device = Device()
    source = Source(lambda: device.state, lambda state: setattr(device, "state", state))
    monkeypatch.setattr(ReplayedRandomness, "_sources", lambda self, layout: [source])

    class OfDevice(Noisy):
        def draw(self):
            drawn.append(device.draw())
            return drawn[-1]

    drawn = []
    model = build(OfDevice)
    apply_activation_checkpointing(model)
    loss = model(torch.ones(2, 8)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert drawn == [1, 2, 2, 1, 2, 1]
    assert device.state == 2


def test_the_devices_looked_at_are_those_of_the_parameters(monkeypatch):
    seen = []
    monkeypatch.setattr(randomness, "_of_device", seen.append)
    model = nn.Sequential(OfTorch(), OfTorch())
    model[0].down.to("meta")
    apply_activation_checkpointing(model)
    with pytest.raises(RuntimeError):
        model[0](torch.ones(2, 8))
    assert set(seen) == {torch.device("cpu"), torch.device("meta")}
    monkeypatch.undo()
    assert randomness._of_device(torch.device("cpu")) is None
    assert randomness._of_device(torch.device("meta")) is None
