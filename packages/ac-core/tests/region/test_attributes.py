"""Plain attributes: a recompute finds them as its forward did, and what a forward leaves is what one forward leaves."""

import copy
import gc
import operator
import pickle
import threading
import weakref
from collections import Counter, OrderedDict, deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ac_core import ActivationCheckpointingError, apply_activation_checkpointing


class Block(nn.Module):
    """Computes with `self.factor()`, which every test defines, before and after a projection."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.begin()

    def begin(self):
        pass

    def forward(self, x):
        return x + self.down((self.up(x) * self.factor(x)).sin())


def build(kind, depth=2):
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(depth)))


def gradients(model, steps=3, backwards=1, between=lambda model, step: None):
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(5, 8)).square().mean()
        between(model, step)
        for _ in range(backwards):
            loss.backward(retain_graph=True)
    return [p.grad for p in model.parameters()]


def assert_exact(kind, state, **options):
    """The same gradients and the same `state(block)` as without checkpointing."""
    plain, model = build(kind), build(kind)
    apply_activation_checkpointing(model)
    expected, got = gradients(plain, **options), gradients(model, **options)
    assert all(map(torch.equal, expected, got))
    assert [state(block) for block in model] == [state(block) for block in plain]
    return model


class Number(Block):
    def begin(self):
        self.calls = 0

    def factor(self, x):
        self.calls += 1
        return self.calls


class Late(Block):
    """Begins to count in its third forward."""

    def begin(self):
        self.calls = self.seen = 0
        self.register_buffer("forwards", torch.zeros(()))

    def factor(self, x):
        self.forwards.add_(1)
        if self.forwards > 2:
            self.calls += 1
        return 1 + self.calls


class Mask(Block):
    """`None` before the first forward, a tensor after: the first forward takes another path."""

    def begin(self):
        self.mask = None

    def factor(self, x):
        if self.mask is None:
            self.mask = torch.linspace(0, 1, 16)
            return self.mask * 2
        return self.mask


class Lazy(Block):
    """An attribute and a buffer that are not there before the first forward."""

    def factor(self, x):
        if not hasattr(self, "scale"):
            self.scale = 3.0
            self.register_buffer("table", torch.linspace(0, 1, 16))
            return 0.5
        return self.scale * self.table


class Vanishing(Block):
    def begin(self):
        self.first = None

    def factor(self, x):
        if "first" in vars(self):
            del self.first
            self.second = None
            return 2
        return 1


class Appended(Block):
    def begin(self):
        self.history = []

    def factor(self, x):
        self.history.append(1.0)
        return sum(self.history)


class Inserted(Block):
    def begin(self):
        self.cache = {}
        self.nested = {"sizes": [], "seen": set(), "kinds": Counter(), "order": OrderedDict(), "last": deque(maxlen=2)}

    def factor(self, x):
        first = x.shape not in self.cache
        self.cache.setdefault(x.shape, 1.5)
        self.nested["sizes"].append(len(x))
        self.nested["seen"].add(len(self.nested["sizes"]))
        self.nested["kinds"]["a"] += 1
        self.nested["order"][len(self.nested["order"])] = None
        self.nested["last"].append(self.nested["kinds"]["a"])
        return 1 + first + sum(self.nested["seen"]) + sum(self.nested["last"]) + len(self.nested["order"])


class Record:
    def __init__(self):
        self.calls = 0


class Object(Block):
    """Counts in objects of its own."""

    def begin(self):
        self.record = Record()
        self.space = SimpleNamespace(calls=0)

    def factor(self, x):
        self.record.calls += 1
        self.space.calls += 2
        return self.record.calls + self.space.calls


class Carried(Block):
    """A recurrent state: read, then replaced; a tuple, as an LSTM has it."""

    def begin(self):
        self.state = (torch.ones(16), 1.0)

    def factor(self, x):
        y = self.state[0] * self.state[1]
        self.state = (y.detach() * 0.5 + x.detach().mean(), self.state[1] + 1)
        return y


class InPlace(Block):
    """Tensors among the attributes, written in place: alone, in a list, in an object, in a tuple."""

    def begin(self):
        self.matrix = torch.ones(2, 16)
        self.several = [torch.ones(2, 16)]
        self.space = SimpleNamespace(one=torch.ones(()))
        self.pair = (torch.ones(2, 16), None)

    def factor(self, x):
        held = (self.matrix, self.several[0], self.space.one, self.pair[0])
        y = sum(each.sum() for each in held)
        for each in held:
            each.mul_(0.5).add_(x.detach().mean())
        return y


def tensors_of(block):
    return [t.tolist() for t in (block.matrix, block.several[0], block.space.one, block.pair[0])]


CASES = {
    Number: lambda b: b.calls,
    Late: lambda b: b.calls,
    Mask: lambda b: b.mask.tolist(),
    Lazy: lambda b: (b.scale, list(b.state_dict())),
    Vanishing: lambda b: ("first" in vars(b), b.second),
    Appended: lambda b: b.history,
    Inserted: lambda b: (b.cache, b.nested),
    Object: lambda b: (b.record.calls, b.space.calls),
    Carried: lambda b: (b.state[0].tolist(), b.state[1]),
    InPlace: tensors_of,
}


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_seen_as_the_forward_saw_it_and_changed_once(kind, backwards):
    assert_exact(kind, CASES[kind], backwards=backwards)


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_two_forwards_before_either_backward(kind):
    """Each recompute sees its own forward's state, whichever runs first."""

    def run(order):
        model = build(kind)
        apply_activation_checkpointing(model) if order is not None else None
        losses = [model(torch.full((5, 8), 0.1 * (i + 1))).square().mean() for i in range(2)]
        return [torch.autograd.grad(losses[i], list(model.parameters())) for i in order or (0, 1)], model

    expected, plain = run(None)
    for order in ((0, 1), (1, 0)):
        got, model = run(order)
        for index, grads in zip(order, got, strict=True):
            assert all(map(torch.equal, expected[index], grads))
        assert [CASES[kind](b) for b in model] == [CASES[kind](b) for b in plain]


@pytest.mark.parametrize("to_training", [True, False])
def test_training_switched_between_forward_and_backward(to_training):
    class Noisy(Block):
        def begin(self):
            self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.5)

        def factor(self, x):
            return self.norm(self.drop(torch.ones(5, 16) + x.mean()))

    plain, model = build(Noisy).train(not to_training), build(Noisy).train(not to_training)
    apply_activation_checkpointing(model)

    def switch(model, step):
        model.train(to_training)

    assert all(map(torch.equal, gradients(plain, 1, between=switch), gradients(model, 1, between=switch)))
    assert all(m.training == to_training for m in model.modules())


def test_what_is_set_from_outside_between_forward_and_backward_counts_for_the_next_forward():
    def between(model, step):
        for block in model:
            block.calls = 10 * step

    assert_exact(Number, lambda b: b.calls, between=between)


def test_a_list_that_is_emptied_between_forward_and_backward_stays_empty():
    def between(model, step):
        for block in model:
            block.history.clear()

    assert assert_exact(Appended, lambda b: b.history, between=between)[0].history == []


class Loss(Block):
    """Leaves a loss for its model in an attribute, and the logits of it."""

    def begin(self):
        self.gate = nn.Linear(8, 4)
        self.aux_loss = None
        self.losses = []

    def factor(self, x):
        self.logits = self.gate(x)
        self.aux_loss = self.logits.logsumexp(-1).square().mean()
        self.losses.append(self.logits.square().mean())
        return self.logits.softmax(-1).amax(-1, keepdim=True)


def test_a_loss_left_in_an_attribute_is_the_forwards_with_the_forwards_graph():
    plain, model = build(Loss), build(Loss)
    apply_activation_checkpointing(model)
    for step in range(3):
        for m in (plain, model):
            x = torch.full((5, 8), 0.1 * (step + 1))
            loss = m(x).square().mean() + sum(block.aux_loss for block in m)
            left = [(block.aux_loss, block.logits, *block.losses) for block in m]
            (loss + sum(sum(block.losses) for block in m)).backward()
            for block, before in zip(m, left, strict=True):
                assert all(map(operator.is_, (block.aux_loss, block.logits, *block.losses), before))
                block.losses = []
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_forwards_without_a_backward_keep_nothing_of_earlier_ones():
    model = build(Loss)
    apply_activation_checkpointing(model)
    gc.collect()
    gc.disable()
    try:
        inputs = []
        for _ in range(4):
            x = torch.randn(5, 8)
            inputs.append(weakref.ref(x))
            for block in model:
                block.losses = []
            model(x)
            del x
        assert [ref() is None for ref in inputs] == [True, True, True, False]
    finally:
        gc.enable()


def test_a_backward_in_another_thread():
    model, plain = build(Number), build(Number)
    apply_activation_checkpointing(model)
    expected = gradients(plain)
    for step in range(3):
        torch.manual_seed(step)
        loss = model(torch.randn(5, 8)).square().mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert all(map(torch.equal, expected, [p.grad for p in model.parameters()]))
    assert [block.calls for block in model] == [3, 3]


def test_a_forward_that_fails_leaves_what_it_left():
    class Failing(Number):
        def factor(self, x):
            super().factor(x)
            if self.calls == 2:
                raise ValueError("once")
            return self.calls

    model = build(Failing)
    apply_activation_checkpointing(model)
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(ValueError, match="once"):
        model[0](torch.ones(2, 8))
    assert model[0].calls == 2
    model[0](torch.ones(2, 8)).sum().backward()
    assert model[0].calls == 3


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copy_has_its_own_attributes(duplicate):
    model = build(Number)
    apply_activation_checkpointing(model)
    gradients(model)
    twin = duplicate(model)
    gradients(twin)
    assert [block.calls for block in model] == [3, 3]
    assert [block.calls for block in twin] == [6, 6]


def test_a_module_that_is_replaced_between_forward_and_backward_is_an_error():
    model = build(Mask)
    apply_activation_checkpointing(model)
    loss = model(torch.ones(2, 8)).sum()
    model[0].up = nn.Linear(8, 16)
    with pytest.raises(ActivationCheckpointingError, match="block '0' has other modules than in its forward"):
        loss.backward()


@pytest.mark.parametrize("whole", [True, False], ids=["model", "block"])
def test_compiled_it_is_still_counted_once(whole):
    plain, model = build(Number), build(Number)
    apply_activation_checkpointing(model)
    for target in (model,) if whole else model:
        target.compile(backend="aot_eager")
    assert all(map(torch.equal, gradients(plain), gradients(model)))
    assert [block.calls for block in model] == [3, 3]
