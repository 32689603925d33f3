import importlib
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import ac_moe.cache.modes


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_see_nothing_inside_and_everything_after() -> None:
    """Fails if torch moves or changes the private name that ac_moe.cache.modes rests on."""
    x = torch.ones(2)
    with Recording() as outer, Recording() as inner:
        with ac_moe.cache.modes.without_dispatch_modes():
            x.sin()
        with pytest.raises(KeyError), ac_moe.cache.modes.without_dispatch_modes():
            raise KeyError
        x.cos()
    assert inner.seen == outer.seen == ["aten.cos.default"]


def test_a_mode_that_says_so_sees_everything() -> None:
    class Meter(Recording):
        needs_every_operation = True

    x = torch.ones(2)
    with Meter() as outer, Recording() as hidden, Meter() as inner:
        with ac_moe.cache.modes.without_dispatch_modes():
            x.sin()
        with pytest.raises(KeyError), ac_moe.cache.modes.without_dispatch_modes():
            raise KeyError
        x.cos()
    assert hidden.seen == ["aten.cos.default"]
    assert inner.seen == outer.seen == ["aten.sin.default", "aten.cos.default"]


def test_what_is_created_there_is_fake_where_tensors_are() -> None:
    with FakeTensorMode(), Recording() as hidden, ac_moe.cache.modes.without_dispatch_modes():
        made = torch.zeros(3)
    assert isinstance(made, FakeTensor)
    assert hidden.seen == []


def test_whether_a_mode_answers_for_torch() -> None:
    class Answering(Recording):
        answers = frozenset({torch.ops.aten.mm.default})

    with Recording():
        assert not ac_moe.cache.modes.is_answered(torch.ops.aten.mm.default)
        with Answering():
            assert ac_moe.cache.modes.is_answered(torch.ops.aten.mm.default)
            assert not ac_moe.cache.modes.is_answered(torch.ops.aten.add.Tensor)


def test_a_torch_without_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_python_dispatch, "_disable_current_modes")
    monkeypatch.setitem(sys.modules, "ac_moe.cache.modes", None)
    monkeypatch.delitem(sys.modules, "ac_moe.cache.modes")
    with pytest.raises(ImportError, match=rf"torch 2\.11 to 2\.13 have and torch {torch.__version__[:4]}"):
        importlib.import_module("ac_moe.cache.modes")


def test_answering_builds_the_node_and_runs_nothing() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with ac_moe.cache.modes.answering(torch.ops.aten.mm.default, lambda a, b: a.new_full((1,), 7.0).expand(2, 2)):
        y = x @ x
        z = x.sin()
    assert y.grad_fn.name() == "MmBackward0"
    assert y.tolist() == [[7.0, 7.0]] * 2
    assert torch.equal(z, x.sin())
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2, 2), 4.0))


def test_dynamo_tracing_is_told() -> None:
    """Fails if torch moves the private name, or no longer looks at tensors while it traces."""
    told = []

    class Watching(torch.Tensor):
        @classmethod
        @torch.compiler.disable
        def __torch_function__(cls, func: object, types: object, args: tuple = (), kwargs: object = None) -> object:
            told.append(ac_moe.cache.modes.dynamo_is_tracing())
            return super().__torch_function__(func, types, args, kwargs or {})

    watched = torch.ones(2).as_subclass(Watching)
    told.clear()
    watched.sin()
    assert told
    assert not any(told)
    torch.compile(lambda x: x, backend="eager")(watched)
    assert any(told)
