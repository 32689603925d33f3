"""What a module's forward changes besides its result: a recompute that jumps over it would leave that out."""

import random
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from ac_core.region.generators import is_generator, state_of
from ac_core.region.randomness import named_in_files_of
from ac_core.region.tracing import never_compiled
from ac_core.selective.tensors import version

_PLAIN = (Tensor, NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_STANDARD = frozenset(nn.Module().__dict__) - {"training", "_buffers"}
_ABSENT = object()


class Effects:
    """The state inside of a module, and of what it is given, before a forward; and what that has changed of it.

    Seen are attributes, buffers, built-in containers one level deep, generators, Python's own random numbers where a
    class of the module is from a file that has them, and whether forward hooks are there to do who knows what. Inputs
    changed in place are seen elsewhere, by their versions.
    """

    @never_compiled
    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._modules = list(module.modules())
        self._attributes = [_attributes(inner) for inner in self._modules]
        self._contents = [_contents(attributes) for attributes in self._attributes]
        self._given = {
            place: value for place, value in (*enumerate(args), *kwargs.items()) if isinstance(value, list | dict | set)
        }
        self._given_contents = _contents(self._given)
        self._random = self._read_random()

    @never_compiled
    def changed(self) -> str | None:
        """What is no longer as it was, or is not certain to be: words for a message."""
        for inner, before, contents in zip(self._modules, self._attributes, self._contents, strict=True):
            now = _attributes(inner)
            for name in (*now, *(name for name in before if name not in now)):
                if now.get(name, _ABSENT) is not before.get(name, _ABSENT):
                    return f"attribute '{name}' of {type(inner).__name__}"
            if contents != (after := _contents(now)):
                name = next(name for name in after if after[name] != contents.get(name))
                return f"attribute '{name}' of {type(inner).__name__}"
            if inner is not self._modules[0] and (inner._forward_hooks or inner._forward_pre_hooks):
                return f"what the forward hooks of {type(inner).__name__} do"
        if _contents(self._given) != self._given_contents:
            return "a container that it is given"
        return "Python's random numbers" if self._read_random() != self._random else None

    def _read_random(self) -> Any:
        named = any(named_in_files_of(type(inner)) for inner in self._modules)
        return random.getstate() if named else None


def is_plain(value: Any) -> bool:
    """Whether a part of a result can be kept: a tensor, or a value that nobody can change."""
    return isinstance(value, _PLAIN)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes and buffers, without what every module has."""
    attributes = {name: value for name, value in module.__dict__.items() if name not in _STANDARD}
    return attributes | attributes.pop("_buffers")


def _contents(attributes: dict[Any, Any]) -> dict[Any, Any]:
    """What is in those attributes that can change while they stay the same object."""
    contents: dict[Any, Any] = {}
    for name, value in attributes.items():
        kind = type(value)
        if kind in (int, bool, str, float, NoneType):
            continue
        if isinstance(value, Tensor):
            contents[name] = version(value)
        elif kind is dict:
            contents[name] = [
                (key, id(item), version(item) if isinstance(item, Tensor) else 0) for key, item in value.items()
            ]
        elif kind in (list, set):
            contents[name] = list(map(id, value))
        elif is_generator(value):
            state = state_of(value)
            contents[name] = state.tolist() if isinstance(state, Tensor) else state
    return contents
