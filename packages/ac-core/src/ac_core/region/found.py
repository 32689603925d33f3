"""The state that the modules of a block hold, as a forward finds it."""

from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache
from operator import is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ac_core.region.generators import is_generator
from ac_core.region.holders import CONTAINERS, OBJECTS, Access, Attributes, Contents, HeldContainer, same
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

Substitute = Callable[[Tensor], Tensor]


class Undo(NamedTuple):
    """What a recompute replaced, with what was there before."""

    tensors: list[tuple[dict[str, Any], str, Tensor]]
    attributes: list[tuple[Attributes, dict[str, Any]]]
    containers: list[tuple[Access, Any, Contents]]


class Found:
    """What the modules of a block held at one moment.

    Attributes:
        tensors: the tensors among it, each with its path.
        generators: the private generators of random numbers among it.
        lasting: it may serve later forwards, as long as it is `still` so. Not where something else stands for what was
            found, as for a tensor with a graph.
    """

    def __init__(self, layout: Layout, block: str) -> None:
        self.layout = layout
        self.tensors: list[tuple[Path, Tensor]] = []
        self.generators: list[Any] = []
        self.lasting = True
        self._block = block
        self._seen: dict[int, HeldContainer] = {}
        self._homes = frozenset().union(*(_homes_of(type(module)) for module in layout.modules))
        holders = [
            Attributes(live, only=_TRAINING if _keeps_records(type(module)) else None)
            for module, live in zip(layout.modules, layout.attributes, strict=True)
        ]
        holders += map(Attributes, layout.buffers)
        self._attributes = [(holder, self._look_into(holder.read(), (id(holder.live),))) for holder in holders]
        del self._seen  # the `id`s are those of this moment
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
            return all(map(is_, values, self._values)) and all(
                _still(live[name], held) for live, name, held in self._containers
            )
        except KeyError:
            return False

    def put_in(self, substitute: Substitute) -> Undo:
        """Puts everything back as it was found, with other tensors for some."""
        undo = Undo([], [], [])
        if self.lasting and self.still():
            for live, name, value in self._tensors:
                if (other := substitute(value)) is not value:
                    undo.tensors.append((live, name, value))
                    live[name] = other
            return undo
        placed: dict[HeldContainer, Any] = {}
        for holder, contents in self._attributes:
            now = holder.read()
            undo.attributes.append((holder, now))
            as_found = {
                name: self._place(value, now.get(name), substitute, placed, undo) for name, value in contents.items()
            }
            if not same(now, as_found):
                holder.write(as_found)
        return undo

    def take_out(self, undo: Undo) -> None:
        """Undoes `put_in`, and what a recompute has changed since."""
        for live, name, value in undo.tensors:
            live[name] = value
        if not undo.attributes and not self.still():
            self.put_in(lambda tensor: tensor)
        for holder, contents in undo.attributes:
            if not same(holder.read(), contents):
                holder.write(contents)
        for access, live, contents in undo.containers:
            if not same(access.read(live), contents):
                access.write(live, contents)

    def say(self, path: Path) -> str:
        """A place in the block, for an error."""
        top, *names = path
        holder = next(holder.live for holder, _ in self._attributes if id(holder.live) == top)
        kind = "buffer" if any(holder is buffers for buffers in self.layout.buffers) else "attribute"
        return f"{kind} '{self.layout.place(holder, '.'.join(map(str, names)))}' of block '{self._block}'"

    def _place(self, value: Any, now: Any, substitute: Substitute, placed: dict[HeldContainer, Any], undo: Undo) -> Any:
        """What goes into a place in which `now` is and in which `value` was found."""
        if isinstance(value, Tensor):
            return substitute(value)
        if isinstance(value, _Tuple):
            return value.make([self._place(item, None, substitute, placed, undo) for item in value.items])
        if not isinstance(value, HeldContainer):
            return value
        if value in placed:
            return placed[value]
        access = value.access
        live = placed[value] = now if value.is_(now) else value.empty()
        inside = access.read(live)
        undo.containers.append((access, live, inside))
        contents = value.contents
        if isinstance(contents, dict) and isinstance(inside, dict):
            contents = {k: self._place(v, inside.get(k), substitute, placed, undo) for k, v in contents.items()}
        elif isinstance(contents, list) and isinstance(inside, list):
            nows = inside + [None] * len(contents)
            contents = [self._place(v, n, substitute, placed, undo) for v, n in zip(contents, nows, strict=False)]
        if not same(inside, contents):
            access.write(live, contents)
        return live

    def _look_into(self, contents: Contents, path: Path) -> Any:
        """The contents of a holder, with what stands for the values in them."""
        if len(contents) > _LARGE or isinstance(contents, set):
            return contents
        pairs: Iterable[tuple[Any, Any]] = contents.items() if isinstance(contents, dict) else enumerate(contents)
        for key, value in pairs:
            if type(value) not in _CONSTANTS:
                contents[key] = self._take(value, (*path, key))
        return contents

    def _take(self, value: Any, path: Path) -> Any:
        """What is remembered of a value: itself, or what stands for it."""
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, tuple):
            items = [self._take(item, (*path, index)) for index, item in enumerate(value)]
            if not any(isinstance(item, (Tensor, _Tuple, HeldContainer)) for item in items):
                return value
            self.lasting = False
            return _Tuple(items, getattr(type(value), "_make", type(value)))
        if is_generator(value):
            self.generators.append(value)
        access = self._access(value)
        if access is None:
            return value
        if (seen := self._seen.get(id(value))) is not None:
            self.lasting = False  # in two places, or in itself
            return seen
        held = self._seen[id(value)] = HeldContainer(value, access)
        self._look_into(held.contents, path)
        values = held.contents.values() if isinstance(held.contents, dict) else held.contents
        held.nested = any(type(each) is HeldContainer for each in values)
        return held

    def _tensor(self, value: Tensor, path: Path) -> Tensor:
        if isinstance(value, nn.Parameter) or value.is_inference():
            return value
        if value.grad_fn is not None:
            # Only what a recompute can use: a loss of an earlier step must not keep the graph of that step alive, and
            # with it, through the regions in it, those of all steps before.
            self.lasting = False
            value = value.detach().requires_grad_()
        if len(path) > 2:
            self.lasting = False  # in a container
        self.tensors.append((path, value))
        return value

    def _access(self, value: Any) -> Access | None:
        """How the contents of a value are read, or `None` where they are not state."""
        kind = type(value)
        access = CONTAINERS.get(kind)
        if access is None and kind.__module__ in self._homes and hasattr(value, "__dict__"):
            return None if isinstance(value, (nn.Module, Enum, type)) else OBJECTS
        return access

    def _index(self) -> None:
        """Prepares for `still`. A dictionary with as many entries as before, and with those of all names that it had,
        has the same names."""
        self._empty: list[dict[str, Any]] = []
        self._full: list[tuple[dict[str, Any], int, Callable[[Any], tuple[Any, ...]]]] = []
        self._containers: list[tuple[dict[str, Any], str, HeldContainer]] = []
        self._tensors: list[tuple[dict[str, Any], str, Tensor]] = []
        self._values: list[Any] = []
        for holder, contents in self._attributes:
            live = holder.live
            names = [name for name, value in contents.items() if not isinstance(value, HeldContainer)]
            self._containers += [(live, name, v) for name, v in contents.items() if isinstance(v, HeldContainer)]
            self._tensors += [(live, name, v) for name, v in contents.items() if isinstance(v, Tensor)]
            if names:
                # Of two names at least, or it would give no tuple.
                entries = itemgetter(*names, names[0])
                self._full.append((live, len(live), entries))
                self._values += entries(live)
            elif not live:
                self._empty.append(live)


class _Tuple:
    """A tuple with tensors or containers in it; `make` makes one of its kind."""

    def __init__(self, items: list[Any], make: Callable[[list[Any]], Any]) -> None:
        self.items = items
        self.make = make


def _still(value: Any, held: HeldContainer) -> bool:
    """Whether a container is the one that was found and holds what it held."""
    if not held.is_(value):
        return False
    view, was = held.access.view(value), held.contents
    if not held.nested:
        return same(view, was)
    if len(view) != len(was):
        return False
    if isinstance(was, dict):
        if not all(map(is_, view, was)):
            return False
        view, was = view.values(), list(was.values())
    return all(_still(n, w) if type(w) is HeldContainer else n is w for n, w in zip(view, was, strict=True))


@cache
def _keeps_records(kind: type[nn.Module]) -> bool:
    """Whether a class is Transformer Engine's or made of one, as `fully_shard` makes them."""
    return any(base.__module__.startswith("transformer_engine.") for base in kind.__mro__)


@cache
def _homes_of(kind: type[nn.Module]) -> frozenset[str]:
    """The files, by module name, that the class of a module and its bases are defined in, but for torch's own."""
    homes = {base.__module__ for base in kind.__mro__}
    return frozenset(home for home in homes if home.partition(".")[0] not in ("torch", "builtins", "abc"))
