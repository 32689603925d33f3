"""The parts of a block's state together: nothing is half restored, nothing is in a compiled graph, copies are free."""

import copy
import pickle

import pytest
import torch
from torch import nn

from ac_core import ActivationCheckpointingError, apply_activation_checkpointing
from ac_core.region.state import BlockState, state_contexts


class Everything(nn.Module):
    """A bit of all: a norm, a dropout, a private generator, a counter, a constant table."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("table", torch.eye(8))
        self.generator = torch.Generator().manual_seed(1)
        self.calls = 0
        self.history = []

    def forward(self, x):
        self.calls += 1
        self.history.append(self.calls)
        noise = torch.rand(16, generator=self.generator) + sum(self.history)
        return x + self.drop(self.down((self.up(self.norm(x) @ self.table) * noise).sin()))


def build():
    torch.manual_seed(0)
    return nn.Sequential(Everything(), Everything())


def run(model, mode="train", backwards=1, steps=3):
    getattr(model, mode)()
    torch.manual_seed(1)
    for _ in range(steps):
        loss = model(torch.randn(5, 8)).square().mean()
        for _ in range(backwards):
            loss.backward(retain_graph=True)
    left = [(b.calls, b.history, b.generator.get_state().tolist()) for b in model]
    return {**dict(model.named_buffers()), **{n: p.grad for n, p in model.named_parameters()}}, left, torch.rand(3)


def assert_same(left, right):
    assert [name for name in left[0] if not torch.equal(left[0][name], right[0][name])] == []
    assert left[1] == right[1]
    assert torch.equal(left[2], right[2])


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_step_is_the_step_without_checkpointing(mode, backwards):
    model = build()
    apply_activation_checkpointing(model)
    assert_same(run(build(), mode, backwards), run(model, mode, backwards))


def test_a_validation_pass_between_forward_and_backward():
    plain, model = build(), build()
    apply_activation_checkpointing(model)
    results = []
    for m in (plain, model):
        torch.manual_seed(1)
        loss = m(torch.randn(5, 8)).square().mean()
        m.eval()
        with torch.no_grad():
            m(torch.randn(5, 8))
        loss.backward()
        results.append([*(p.grad for p in m.parameters()), *m.buffers()])
        assert [b.calls for b in m] == [2, 2]
        assert not any(module.training for module in m.modules())
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_what_has_been_learnt_does_not_hinder_a_copy(duplicate):
    class Plain(Everything):
        def __init__(self):
            super().__init__()
            self.generator = None

        def forward(self, x):
            return x + self.down(self.up(self.norm(x)).sin())

    globals()["Plain"] = Plain
    Plain.__qualname__ = "Plain"
    model = nn.Sequential(Plain(), Plain())
    apply_activation_checkpointing(model)
    model(torch.ones(3, 8)).sum().backward()
    twin = duplicate(model)
    twin(torch.ones(3, 8)).sum().backward()
    assert twin[0].norm.num_batches_tracked == 2
    assert model[0].norm.num_batches_tracked == 1


def test_a_refused_recompute_leaves_everything_as_it_was():
    model = build()
    apply_activation_checkpointing(model)
    loss = model(torch.ones(5, 8)).sum()
    with torch.no_grad():
        model[1].up.weight.add_(1)
    model.eval()
    before = (model[1].calls, list(model[1].history), torch.get_rng_state())
    with pytest.raises(ActivationCheckpointingError, match=r"'up\.weight' of block '1'"):
        loss.backward()
    assert (model[1].calls, model[1].history) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert not model[1].training


def test_a_tensor_written_between_forward_and_backward_is_an_error_and_not_a_guess():
    model = build()
    apply_activation_checkpointing(model)
    model(torch.ones(5, 8)).sum().backward()
    loss = model(torch.ones(5, 8)).sum()
    model[1].table.mul_(2)
    with pytest.raises(ActivationCheckpointingError, match="buffer 'table' of block '1' was modified in place since"):
        loss.backward()
    assert model[1].calls == 2


def test_modes_inside_do_not_see_what_is_done():
    """A mode that counts operations of the block, or serves kept ones, must not meet the copies of its state."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen = []
    model = build()
    apply_activation_checkpointing(model, context_fn=lambda: (Counting(), Counting()))
    model(torch.ones(5, 8)).sum().backward()
    assert "aten.clone.default" not in seen
    assert any("batch_norm" in name for name in seen)


def test_one_context_function_a_block():
    block = Everything()
    (state,) = state_contexts(block, "layers.0")
    assert isinstance(state, BlockState)
    assert (state.block, state.name) == (block, "layers.0")


@pytest.mark.parametrize("order", ["model", "blocks"])
def test_a_block_with_state_compiles_without_a_graph_break(order):
    class Steady(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
            self.register_buffer("table", torch.eye(8))
            self.sizes = [1]

        def forward(self, x):
            return x + self.down(self.up(x @ self.table).sin())

    torch._dynamo.reset()
    model = nn.Sequential(Steady(), Steady())
    apply_activation_checkpointing(model)
    for target in (model,) if order == "model" else model:
        target.compile(backend="aot_eager", fullgraph=True)
    model(torch.ones(3, 8)).sum().backward()
    assert model[0].up.weight.grad is not None
