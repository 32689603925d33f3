import importlib
import sys

import pytest
import torch
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


def test_a_torch_without_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_python_dispatch, "_disable_current_modes")
    monkeypatch.setitem(sys.modules, "ac_moe.cache.modes", None)
    monkeypatch.delitem(sys.modules, "ac_moe.cache.modes")
    with pytest.raises(ImportError, match=rf"torch 2\.11 to 2\.13 have and torch {torch.__version__[:4]}"):
        importlib.import_module("ac_moe.cache.modes")
