"""What holds the state of a block: the attributes and buffers of modules, and containers and objects in them."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from operator import is_
from types import SimpleNamespace
from typing import Any, NamedTuple

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
        return {name: value for name, value in self.live.items() if name not in not_state and not name.startswith("__")}

    def write(self, contents: dict[str, Any]) -> None:
        names = list(self.read())
        if names != list(contents):  # the order of buffers is that of `state_dict`
            for name in names:
                del self.live[name]
        self.live.update(contents)


class Access(NamedTuple):
    """How a kind of container is dealt with: what shows its contents, how they are copied and replaced, and how an
    empty one like another is made."""

    view: Callable[[Any], Any]
    copy: Callable[[Any], Contents]
    replace: Callable[[Any, Contents], None]
    empty_like: Callable[[Any], Callable[[], Any]]

    def read(self, live: Any) -> Contents:
        return self.copy(self.view(live))

    def write(self, live: Any, contents: Contents) -> None:
        self.replace(self.view(live), contents)


def _itself(live: Any) -> Any:
    return live


def _replace_entries(view: Any, contents: Contents) -> None:
    view.clear()
    view.update(contents)


def _replace_elements(view: Any, contents: Contents) -> None:
    view.clear()
    view.extend(contents)


_dicts = Access(_itself, dict, _replace_entries, type)
OBJECTS = Access(vars, dict, _replace_entries, lambda live: partial(object.__new__, type(live)))
"""Objects by their attributes."""
CONTAINERS: dict[type, Access] = {
    **dict.fromkeys((dict, OrderedDict, Counter), _dicts),
    defaultdict: _dicts._replace(empty_like=lambda live: partial(defaultdict, live.default_factory)),
    list: Access(_itself, list, _replace_elements, type),
    deque: Access(_itself, list, _replace_elements, lambda live: partial(deque, maxlen=live.maxlen)),
    set: Access(_itself, set, _replace_entries, type),
    SimpleNamespace: OBJECTS,
}
"""The containers whose contents are state. Subclasses of one's own, with ideas about what may be put in, are not."""


class HeldContainer:
    """A container or an object as it was found.

    It is known by its `id` and not kept alive: a forward may put a tensor into it whose graph holds the region that
    holds this, and no collector finds a cycle through a graph. Where it is no longer in its place, or another one has
    its `id`, an equal one does.
    """

    def __init__(self, live: Any, access: Access) -> None:
        self.access = access
        self.contents = access.read(live)
        self.empty = access.empty_like(live)
        self.nested = False  # whether there are others in it
        self._id = id(live)
        self._kind = type(live)

    def is_(self, value: Any) -> bool:
        return id(value) == self._id and type(value) is self._kind


def same(left: Any, right: Contents) -> bool:
    """Whether a view or contents on the left hold the very same objects in the same order as contents do."""
    if len(left) != len(right):
        return False
    if type(right) is dict:
        return all(map(is_, left, right)) and all(map(is_, left.values(), right.values()))
    return left == right if type(right) is set else all(map(is_, left, right))
