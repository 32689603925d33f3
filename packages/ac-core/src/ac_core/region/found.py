"""The state of a block as a forward finds it."""

from collections.abc import Callable
from enum import Enum
from functools import cache
from itertools import islice
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ac_core.region.generators import is_generator, state_of
from ac_core.region.holders import CONTAINERS, Attributes, Contents, Holder, Mapping, same
from ac_core.region.tensors import HeldTensor, Path, TensorLearner

# NOTE [ What counts as state ]
# 1. Of every module in the block: its own attributes, `training`, and its buffers. Parameters do not: a recompute with
#    other ones is an error (`region/parameters.py`).
# 2. In these, to any depth: the contents of built-in containers and of `SimpleNamespace`s, and the attributes of
#    objects of a class that is defined in the same file as the class of one of the block's modules. Objects of other
#    classes are left alone: a library may keep the other half of their state elsewhere, and the halves would no longer
#    fit (bitsandbytes moves a weight from a parameter's attribute into such an object in the first forward).
# 3. Tensors that are written in place (`region/tensors.py`) and private generators of random numbers.
# 4. Not the attributes of Transformer Engine's modules: they hold records for recomputes of its own.

_CONSTANTS = frozenset(
    (NoneType, bool, int, float, complex, str, bytes, type, FunctionType, BuiltinFunctionType, MethodType)
    + (torch.dtype, torch.device, torch.Size, frozenset, range)
)
_LARGE = 4096
"""Elements above which a container is remembered element by element, without a look into them."""
_TRAINING = frozenset(("training",))


class Found:
    """What the modules of a block held at one moment.

    Attributes:
        holders: each module and container, with its contents; a tensor in them is a `HeldTensor`.
        tensors, generators: those that were found, the generators with their state.
        constant: nothing was found that can change without another object taking its place in a holder. Such a `Found`
            may serve many forwards.
    """

    def __init__(self, modules: list[nn.Module], block: str, learner: TensorLearner) -> None:
        self.modules = modules
        self.holders: list[tuple[Holder, Contents]] = []
        self.tensors: list[HeldTensor] = []
        self.generators: list[tuple[Any, Any]] = []
        self._block = block
        self._learner = learner
        self._copies: dict[int, Tensor] = {}
        self._seen: set[int] = set()
        self._homes = frozenset().union(*(_homes_of(type(module)) for module in modules))
        self._containers: list[tuple[Any, Contents]] = []
        for index, module in enumerate(modules):
            engine = type(module).__module__.startswith("transformer_engine.")
            self._hold(Attributes(vars(module), only=_TRAINING if engine else None), (index, "attribute"))
            if isinstance(buffers := vars(module).get("_buffers"), dict):
                self._hold(Attributes(buffers), (index, "buffer"))
        self.constant = not self.tensors and not self.generators
        if self.constant:
            self._starts = [_start_of_own(module) for module in modules]
            self._names, self._values = self.look()

    def contents(self) -> list[tuple[Holder, Contents]]:
        """Each holder with what a recompute finds in it.

        Raises:
            ActivationCheckpointingError: a tensor that the forward left alone was written to since.
        """
        if not self.tensors:
            return self.holders
        copies: dict[int, Tensor] = {}

        def as_found(value: Any) -> Any:
            if isinstance(value, HeldTensor):
                return value.as_found(copies, self.say)
            return value.make(map(as_found, value.items)) if isinstance(value, _HeldTuple) else value

        return [
            (
                holder,
                {name: as_found(value) for name, value in contents.items()}
                if isinstance(contents, dict)
                else type(contents)(map(as_found, contents)),
            )
            for holder, contents in self.holders
        ]

    def look(self) -> tuple[list[str], list[Any]]:
        """The names and values of all attributes and buffers now, as fast as Python can."""
        names: list[str] = []
        values: list[Any] = []
        for module, start in zip(self.modules, self._starts, strict=True):
            attributes = module.__dict__
            values.append(attributes.get("training"))
            if len(attributes) > start:
                names.extend(islice(attributes, start, None))
                values.extend(islice(attributes.values(), start, None))
            if buffers := attributes.get("_buffers"):
                names.extend(buffers)
                values.extend(buffers.values())
        return names, values

    def still(self, look: tuple[list[str], list[Any]]) -> bool:
        """Of a constant one: whether the same objects are in the same places."""
        names, values = look
        return (
            len(values) == len(self._values)
            and all(map(is_, values, self._values))
            and names == self._names
            and all(same(live, contents) for live, contents in self._containers)
        )

    def say(self, path: Path) -> str:
        """A place in the block, for an error."""
        index, kind, *names = path
        module = next(n for n, m in self.modules[0].named_modules() if m is self.modules[index])
        place = ".".join(map(str, filter(None, (module, *names))))
        return f"{kind} '{place}' of block '{self._block}'"

    def _hold(self, holder: Holder, path: Path) -> None:
        contents = holder.read()
        self.holders.append((holder, contents))
        if not isinstance(holder, Attributes):
            self._containers.append((holder.live, contents))
            if len(contents) > _LARGE:
                return
        take = self._take
        if isinstance(contents, dict):
            for name, value in contents.items():
                if type(value) not in _CONSTANTS:
                    contents[name] = take(value, (*path, name))
        elif isinstance(contents, list):
            for index, value in enumerate(contents):
                if type(value) not in _CONSTANTS:
                    contents[index] = take(value, (*path, index))

    def _take(self, value: Any, path: Path) -> Any:
        """What is remembered of a value: itself, or what stands for it."""
        kind = type(value)
        if isinstance(value, Tensor):
            return value if isinstance(value, nn.Parameter) or value.is_inference() else self._tensor(value, path)
        if isinstance(value, tuple):
            items = [self._take(item, (*path, index)) for index, item in enumerate(value)]
            if all(map(is_, items, value)):
                return value
            return _HeldTuple(items, getattr(kind, "_make", kind))
        if id(value) in self._seen:
            return value
        if container := CONTAINERS.get(kind):
            self._seen.add(id(value))
            self._hold(container(value), path)
        elif is_generator(value):
            self._seen.add(id(value))
            self.generators.append((value, state_of(value)))
        elif kind is SimpleNamespace or (
            kind.__module__ in self._homes
            and hasattr(value, "__dict__")
            and not isinstance(value, (nn.Module, Enum, type))
        ):
            self._seen.add(id(value))
            self._hold(Mapping(vars(value)), path)
        return value

    def _tensor(self, value: Tensor, path: Path) -> HeldTensor:
        held = self._learner.hold(value, path, self._copies)
        self.tensors.append(held)
        return held


class _HeldTuple:
    """A tuple with tensors in it; `make` makes one of its kind of an iterable."""

    def __init__(self, items: list[Any], make: Callable[[Any], Any]) -> None:
        self.items = items
        self.make = make


@cache
def _homes_of(kind: type[nn.Module]) -> frozenset[str]:
    """The files, by module name, that the class of a module and its bases are defined in; torch's and built-in ones
    are not looked at."""
    homes = {base.__module__ for base in kind.__mro__}
    return frozenset(home for home in homes if home.partition(".")[0] not in ("torch", "builtins", "abc"))


def _start_of_own(module: nn.Module) -> int:
    """How many of the first attributes of a module are what every module has; 0 where these are in another order."""
    count = len(Attributes.MACHINERY)
    return count if tuple(islice(vars(module), count)) == Attributes.MACHINERY else 0
