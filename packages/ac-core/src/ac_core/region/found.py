"""The state that the modules of a block hold, as a forward finds it."""

from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache
from operator import is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ac_core.region.generators import is_generator
from ac_core.region.holders import CONTAINERS, Attributes, Contents, Holder, Mapping, same
from ac_core.region.layout import Layout
from ac_core.region.tensors import Path

# NOTE [ What counts as state ]
# 1. Of every module in the block: its own attributes, `training`, and its buffers. Parameters do not: a recompute with
#    other ones is an error (`region/parameters.py`).
# 2. In these, to any depth: the contents of built-in containers and of `SimpleNamespace`s, and the attributes of
#    objects of a class that is defined in the same file as the class of one of the block's modules. Objects of other
#    classes are left alone: a library may keep the other half of their state elsewhere, and the halves would no longer
#    fit (bitsandbytes moves a weight from a parameter's attribute into such an object in the first forward).
# 3. Tensors that are written in place (`region/tensors.py`) and private generators of random numbers.
# 4. Not the attributes of Transformer Engine's modules: they hold records for recomputes of its own.

_CONSTANTS = frozenset((
    *(NoneType, bool, int, float, complex, str, bytes, frozenset, range, type),
    *(FunctionType, BuiltinFunctionType, MethodType, torch.dtype, torch.device, torch.Size),
))  # fmt: skip
_LARGE = 4096
"""Elements above which a container is remembered element by element, without a look into them."""
_TRAINING = frozenset(("training",))

Entries = Callable[[Any], tuple[Any, ...]]


class Found:
    """What the modules of a block hold at one moment.

    Attributes:
        holders: each module and container with its contents.
        tensors: the tensors in them, each with its path.
        generators: the private generators in them.
        lasting: it may serve later forwards, as long as it is `still` so. Not where a tensor with a graph was found, for
            which `contents` have another tensor that stands for it.
    """

    def __init__(self, layout: Layout, block: str) -> None:
        self.layout = layout
        self.holders: list[tuple[Holder, Contents]] = []
        self.tensors: list[tuple[Path, Tensor]] = []
        self.generators: list[Any] = []
        self.lasting = True
        self._block = block
        self._places: list[tuple[Any, Any, Tensor]] = []
        self._seen: set[int] = set()
        self._homes = frozenset().union(*(_homes_of(type(module)) for module in layout.modules))
        for module, attributes in zip(layout.modules, layout.attributes, strict=True):
            engine = type(module).__module__.startswith("transformer_engine.")
            self._hold(Attributes(attributes, only=_TRAINING if engine else None), (id(attributes),))
        for buffers in layout.buffers:
            self._hold(Attributes(buffers), (id(buffers),))
        if self.lasting:
            self._index()

    def still(self) -> bool:
        """Of a lasting one: whether the same objects are in the same places."""
        if any(self._empty):
            return False
        values: list[Any] = []
        try:
            for live, count, entries in self._full:
                if len(live) != count:
                    return False
                values += entries(live)
        except KeyError:
            return False
        return all(map(is_, values, self._values)) and all(same(live, was) for live, was in self._containers)

    def exchange(self, substitute: Callable[[Tensor], Tensor]) -> list[tuple[Any, Any, Tensor]]:
        """Of a lasting one that is `still` so: puts other tensors in the places of some. Returns what puts them back,
        each a container, a key and a tensor."""
        exchanged = [place for place in self._places if substitute(place[2]) is not place[2]]
        for live, key, value in exchanged:
            live[key] = substitute(value)
        return exchanged

    def contents(self, substitute: Callable[[Tensor], Tensor]) -> list[tuple[Holder, Contents]]:
        """The holders, with other tensors in their contents."""

        def replace(value: Any) -> Any:
            if isinstance(value, Tensor):
                return substitute(value)
            return value.make(map(replace, value.items)) if isinstance(value, _Tuple) else value

        return [
            (
                holder,
                {name: replace(value) for name, value in contents.items()}
                if isinstance(contents, dict)
                else type(contents)(map(replace, contents)),
            )
            for holder, contents in self.holders
        ]

    def say(self, path: Path) -> str:
        """A place in the block, for an error."""
        top, *names = path
        holder = next(holder.live for holder, _ in self.holders if id(holder.live) == top)
        kind = "buffer" if any(holder is buffers for buffers in self.layout.buffers) else "attribute"
        return f"{kind} '{self.layout.place(holder, '.'.join(map(str, names)))}' of block '{self._block}'"

    def _index(self) -> None:
        """Prepares for `still`. A dictionary with as many entries as before, and with those of all names that it had,
        has the same names."""
        self._empty: list[dict[str, Any]] = []
        self._full: list[tuple[dict[str, Any], int, Entries]] = []
        self._containers: list[tuple[Any, Contents]] = []
        self._values: list[Any] = []
        for holder, contents in self.holders:
            if not isinstance(holder, Attributes):
                self._containers.append((holder.live, contents))
            elif contents:
                first, *others = contents
                entries = itemgetter(first, *others, first)  # of two names at least, or it would give no tuple
                self._full.append((holder.live, len(holder.live), entries))
                self._values += entries(holder.live)
            else:
                self._empty.append(holder.live)

    def _hold(self, holder: Holder, path: Path) -> None:
        contents = holder.read()
        self.holders.append((holder, contents))
        if len(contents) > _LARGE or isinstance(contents, set):
            return
        pairs: Iterable[tuple[Any, Any]] = contents.items() if isinstance(contents, dict) else enumerate(contents)
        for key, value in pairs:
            if type(value) in _CONSTANTS:
                continue
            taken = contents[key] = self._take(value, (*path, key))
            if isinstance(taken, Tensor) and taken is value:
                self._places.append((holder.live, key, value))

    def _take(self, value: Any, path: Path) -> Any:
        """What is remembered of a value: itself, or what stands for it."""
        kind = type(value)
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, tuple):
            items = [self._take(item, (*path, index)) for index, item in enumerate(value)]
            if not any(isinstance(item, (Tensor, _Tuple)) for item in items):
                return value
            self.lasting = False  # a tensor in it cannot be exchanged alone
            return _Tuple(items, getattr(kind, "_make", kind))
        if id(value) in self._seen:
            return value
        if container := CONTAINERS.get(kind):
            self._seen.add(id(value))
            self._hold(container(value), path)
        elif is_generator(value):
            self._seen.add(id(value))
            self.generators.append(value)
        elif kind is SimpleNamespace or (
            kind.__module__ in self._homes
            and hasattr(value, "__dict__")
            and not isinstance(value, (nn.Module, Enum, type))
        ):
            self._seen.add(id(value))
            self._hold(Mapping(vars(value)), path)
        return value

    def _tensor(self, value: Tensor, path: Path) -> Tensor:
        if isinstance(value, nn.Parameter) or value.is_inference():
            return value
        if value.grad_fn is not None:
            # Only what a recompute can use: a loss of an earlier step must not keep the graph of that step alive, and
            # through the checkpoint regions in it those of all steps before.
            self.lasting = False
            value = value.detach().requires_grad_()
        self.tensors.append((path, value))
        return value


class _Tuple:
    """A tuple with tensors in it; `make` makes one of its kind of an iterable."""

    def __init__(self, items: list[Any], make: Callable[[Any], Any]) -> None:
        self.items = items
        self.make = make


@cache
def _homes_of(kind: type[nn.Module]) -> frozenset[str]:
    """The files, by module name, that the class of a module and its bases are defined in, but for torch's own."""
    homes = {base.__module__ for base in kind.__mro__}
    return frozenset(home for home in homes if home.partition(".")[0] not in ("torch", "builtins", "abc"))
