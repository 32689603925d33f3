import copy
import functools
import pickle

import pytest
import torch
from ac_moe_local import HIDDEN, each, equal, gradients, inputs, layers, non_reentrant
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

import ac_moe
from ac_moe.cache.region import _threads

save_mm = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("Combine", "mode: 'Combine' is not one of 'none', 'combine', 'moe_tail'"),
        (None, "mode: None is not one of 'none', 'combine', 'moe_tail'"),
    ],
)
def test_modes(mode: object, message: str) -> None:
    with pytest.raises(ValueError, match="mode") as caught:
        ac_moe.context_fn(mode)
    assert str(caught.value) == message


def test_inner_must_be_a_context_fn() -> None:
    with pytest.raises(TypeError, match=r"inner: .* is not callable; give a context_fn"):
        ac_moe.context_fn("combine", inner=save_mm())


def test_none_adds_nothing() -> None:
    assert ac_moe.context_fn("none") is noop_context_fn
    assert ac_moe.context_fn("none", inner=save_mm) is save_mm


@pytest.mark.parametrize("inner", [None, noop_context_fn])
def test_copies(inner: object) -> None:
    made = ac_moe.context_fn("combine", inner=inner)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other()[0]._region.mode == "combine"
        x = torch.randn(3, 3, requires_grad=True)
        checkpoint(lambda x: (x @ x).sin(), x, use_reentrant=False, context_fn=other).sum().backward()
        assert x.grad is not None


def test_each_execution_has_a_region_of_its_own() -> None:
    made = ac_moe.context_fn("combine")
    (forward, recompute), (other, _) = made(), made()
    assert forward._region is recompute._region
    assert forward._region is not other._region


def test_contexts_can_be_entered_again_and_restore_the_stack() -> None:
    _, recompute = ac_moe.context_fn("combine")()
    for _ in range(2):
        with recompute, recompute:
            assert len(_threads.stack) == 2
        assert _threads.stack == []
    with pytest.raises(KeyError), recompute:
        raise KeyError
    assert _threads.stack == []


class Tracing:
    """An inner context that notes what happens to it, and can refuse to be entered or swallow an exception."""

    def __init__(self, log: list[object], *, refuses: bool = False, swallows: bool = False) -> None:
        self.log, self.refuses, self.swallows = log, refuses, swallows

    def __enter__(self) -> None:
        self.log.append(("enter", len(_threads.stack)))
        if self.refuses:
            raise PermissionError

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        self.log.append(("exit", len(_threads.stack), kind))
        return self.swallows


def test_inner_is_around() -> None:
    log: list[object] = []
    forward, recompute = ac_moe.context_fn("combine", inner=lambda: (Tracing(log), Tracing(log)))()
    with forward:
        pass
    with pytest.raises(KeyError), recompute:
        raise KeyError
    assert log == [("enter", 0), ("exit", 0, None), ("enter", 0), ("exit", 0, KeyError)]


def test_inner_that_refuses_or_swallows() -> None:
    log: list[object] = []
    forward, _ = ac_moe.context_fn("combine", inner=lambda: (Tracing(log, refuses=True), None))()
    with pytest.raises(PermissionError), forward:
        pass
    assert _threads.stack == []
    forward, _ = ac_moe.context_fn("combine", inner=lambda: (Tracing(log, swallows=True), None))()
    with forward:
        raise KeyError
    assert _threads.stack == []


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh().sin()


@pytest.mark.filterwarnings("ignore:Detected that context_fn is passed")
@pytest.mark.parametrize("inner", [None, save_mm], ids=["alone", "selective"])
@pytest.mark.parametrize("mode", ["combine", "moe_tail"])
def test_compiled_around_the_checkpoints(mode: str, inner: object) -> None:
    """A block with experts breaks the graph and is served; one without becomes a graph of its own."""
    torch.compiler.reset()
    model, xs = nn.Sequential(Dense(), *layers(1), Dense(), *layers(1)), inputs(2)
    expected = gradients(model, model, xs)
    ac_moe.reset_stats()
    forward = torch.compile(each(non_reentrant(mode, inner=inner), model), backend="aot_eager")
    assert equal(gradients(model, forward, xs), expected)
    stats = ac_moe.stats()
    assert (stats.stored, stats.served, stats.gemms_skipped) == (4, 4, 4 if mode == "moe_tail" else 0)
    assert stats.live_entries == 0


def test_does_nothing_to_a_block_without_experts() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    ac_moe.reset_stats()
    checkpoint(lambda x: x.sin() @ x, x, use_reentrant=False, context_fn=ac_moe.context_fn("combine")).sum().backward()
    cached, x.grad = x.grad, None
    (x.sin() @ x).sum().backward()
    assert torch.equal(cached, x.grad)
    assert ac_moe.stats().stored == 0
