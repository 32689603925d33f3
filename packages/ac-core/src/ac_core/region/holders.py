"""What holds the state of a block, seen alike: something whose contents can be read, compared and put back.

Contents are exchanged inside the same object, so that whoever else refers to it sees the exchange as well.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from operator import is_
from typing import Any

from torch import nn

Contents = dict[Any, Any] | list[Any] | set[Any]


class Attributes:
    """The attributes of a module that are its own, and `training`; or the buffers of a module.

    What `nn.Module` itself keeps in every instance, the forward that checkpointing puts there, and what `fully_shard`
    and its like leave (`__composable...`; Python gives a model's own `self.__name` another name) are not among them.
    """

    _NOT_STATE = frozenset(vars(nn.Module())) - {"training"} | {"forward"}

    def __init__(self, live: dict[str, Any], *, only: frozenset[str] | None = None) -> None:
        self.live = live
        self.only = only

    def read(self) -> dict[str, Any]:
        if self.only is not None:
            return {name: self.live[name] for name in self.only if name in self.live}
        not_state = self._NOT_STATE
        return {
            name: value for name, value in self.live.items() if name not in not_state and not name.startswith("__")
        }

    def write(self, contents: dict[str, Any]) -> None:
        names = list(self.read())
        if names != list(contents):  # the order of buffers is that of `state_dict`
            for name in names:
                del self.live[name]
        self.live.update(contents)


class Mapping:
    """A dict of any built-in kind, or the attributes of an object."""

    def __init__(self, live: dict[Any, Any]) -> None:
        self.live = live

    def read(self) -> dict[Any, Any]:
        return dict(self.live)

    def write(self, contents: dict[Any, Any]) -> None:
        self.live.clear()
        self.live.update(contents)


class Sequence:
    """A list or a deque."""

    def __init__(self, live: list[Any] | deque[Any]) -> None:
        self.live = live

    def read(self) -> list[Any]:
        return list(self.live)

    def write(self, contents: list[Any]) -> None:
        self.live.clear()
        self.live.extend(contents)


class Set:
    """A set."""

    def __init__(self, live: set[Any]) -> None:
        self.live = live

    def read(self) -> set[Any]:
        return set(self.live)

    def write(self, contents: set[Any]) -> None:
        self.live.clear()
        self.live.update(contents)


Holder = Attributes | Mapping | Sequence | Set

CONTAINERS: dict[type, type[Mapping] | type[Sequence] | type[Set]] = {
    **dict.fromkeys((dict, OrderedDict, defaultdict, Counter), Mapping),
    **dict.fromkeys((list, deque), Sequence),
    set: Set,
}
"""The containers whose contents are state. Subclasses of one's own, with ideas about what may be put in, are not."""


def same(left: Any, right: Contents) -> bool:
    """Whether a container, or its contents, holds the very same objects in the same order as `right`."""
    if len(left) != len(right):
        return False
    if isinstance(right, dict):
        return all(map(is_, left, right)) and all(map(is_, left.values(), right.values()))
    if isinstance(right, list):
        return all(map(is_, left, right))
    return left == right
