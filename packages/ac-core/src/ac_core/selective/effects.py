"""What a module's forward changes besides its result: a recompute that jumps over it would leave that out."""

from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from ac_core.region.generators import is_generator, state_of
from ac_core.region.randomness import HOST, named_in_files_of
from ac_core.region.tracing import never_compiled
from ac_core.selective.tensors import version

_PLAIN = (Tensor, NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_STANDARD = frozenset(nn.Module().__dict__) - {"training", "_buffers"}


class Watched:
    """What there is inside of a module to be changed. Good for as long as no attribute of it is another object."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = list(module.modules())
        self.identity = self.identities()
        attributes = [(inner, name, value) for inner in self.modules for name, value in _attributes(inner).items()]
        self.changeable = [(inner, name, value) for inner, name, value in attributes if not _is_constant(value)]
        names = frozenset().union(*(named_in_files_of(type(inner)) for inner in self.modules))
        self.generators = [HOST[name] for name in sorted(names)]

    def identities(self) -> list[tuple[int, ...]]:
        """The objects that the attributes, buffers and children of the modules are."""
        return [
            tuple(map(id, (*inner.__dict__.values(), *inner._buffers.values(), *inner._modules.values())))
            for inner in self.modules
        ]

    def contents(self) -> list[Any]:
        """What is in those objects."""
        return [_content(value) for _, _, value in self.changeable]

    def random_states(self) -> list[Any]:
        """The states of the shared generators that the files of the modules have a name for."""
        return [generator.read() for generator in self.generators]


class Effects:
    """The state inside of a module, and of what it is given, before a forward; and what that has changed of it.

    Seen are attributes, buffers, built-in containers one level deep, generators, Python's and NumPy's random numbers
    where a class of the module is from a file that has them, and whether forward hooks are there to do who knows what.
    Inputs changed in place are seen elsewhere, by their versions.

    watched: of an earlier forward of the module, to save looking again.
    """

    @never_compiled
    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], watched: Watched | None = None
    ) -> None:
        if watched is None or watched.identities() != watched.identity:
            watched = Watched(module)
        self.watched = watched
        self._contents = watched.contents()
        self._given = [value for value in (*args, *kwargs.values()) if isinstance(value, list | dict | set)]
        self._given_contents = list(map(_content, self._given))
        self._random = watched.random_states()

    @never_compiled
    def changed(self) -> str | None:
        """What is no longer as it was, or is not certain to be: words for a message."""
        watched = self.watched
        if watched.identities() != watched.identity:
            return self._rebound()
        for (inner, name, value), before in zip(watched.changeable, self._contents, strict=True):
            if _content(value) != before:
                return f"attribute '{name}' of {type(inner).__name__}"
        for inner in watched.modules[1:]:
            if inner._forward_hooks or inner._forward_pre_hooks:
                return f"what the forward hooks of {type(inner).__name__} do"
        if list(map(_content, self._given)) != self._given_contents:
            return "a container that it is given"
        return "Python's or NumPy's random numbers" if watched.random_states() != self._random else None

    def _rebound(self) -> str:
        for inner, before in zip(self.watched.modules, self.watched.identity, strict=True):
            names = (*inner.__dict__, *inner._buffers, *inner._modules)
            now = tuple(map(id, (*inner.__dict__.values(), *inner._buffers.values(), *inner._modules.values())))
            if now != before:
                known = set(before)
                name = next((name for name, value in zip(names, now, strict=True) if value not in known), names[-1])
                return f"attribute '{name}' of {type(inner).__name__}"
        return "an attribute"


def is_plain(value: Any) -> bool:
    """Whether a part of a result can be kept: a tensor, or a value that nobody can change."""
    return isinstance(value, _PLAIN)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes and buffers, without what every module has."""
    attributes = {name: value for name, value in module.__dict__.items() if name not in _STANDARD}
    return attributes | attributes.pop("_buffers")


def _is_constant(value: Any) -> bool:
    return not isinstance(value, Tensor) and type(value) not in (dict, list, set) and not is_generator(value)


def _content(value: Any) -> Any:
    """What is in an object that can change while it stays the same object."""
    if isinstance(value, Tensor):
        return version(value)
    if type(value) is dict:
        return [(key, id(item), version(item) if isinstance(item, Tensor) else 0) for key, item in value.items()]
    if type(value) in (list, set):
        return list(map(id, value))
    if is_generator(value):
        state = state_of(value)
        return state.tolist() if isinstance(state, Tensor) else state
    return None
