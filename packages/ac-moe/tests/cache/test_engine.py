import contextlib
import importlib
import sys
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ac_moe.cache import engine


def test_what_is_told_inside_a_reentrant_checkpoint() -> None:
    """Fails if torch moves or changes what ac_moe.cache.engine rests on."""
    told = []

    def block(x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            told.append((engine.checkpoint_in_forward(), engine.running_node(), engine.graph_is_kept()))
        else:
            told.append((engine.checkpoint_in_forward(), engine.running_node(), None))
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    y = checkpoint(block, x, use_reentrant=True)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    node = y.grad_fn
    assert told == [(node, None, None), (None, node, True), (None, node, False)]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("grad", [True, False])
def test_no_node_where_no_backward_comes(grad: bool) -> None:
    """Gradients are off where the checkpoint is called, or no input needs one."""
    told = []

    def block(x: torch.Tensor) -> torch.Tensor:
        told.append(engine.checkpoint_in_forward())
        return x.sin()

    with torch.set_grad_enabled(grad):
        checkpoint(block, torch.ones(2, requires_grad=not grad), use_reentrant=True)
    assert told == [None]


def test_it_keeps_no_local_of_a_caller_alive() -> None:
    """Training loops call their autocast `ctx`; what else they hold must be freed when they let go of it."""

    def evaluate() -> None:
        ctx, logits = contextlib.nullcontext(), torch.ones(2)
        alive = weakref.ref(logits)
        with ctx:
            assert engine.checkpoint_in_forward() is None
        del logits
        assert alive() is None

    evaluate()


def test_a_torch_without_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_current_autograd_node")
    monkeypatch.delitem(sys.modules, "ac_moe.cache.engine")
    with pytest.raises(ImportError, match=rf"needs torch._C._current_autograd_node .* torch {torch.__version__[:4]}"):
        importlib.import_module("ac_moe.cache.engine")
