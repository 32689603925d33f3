"""A method of one object, replaced for that object alone."""

from collections.abc import Callable, Iterator
from typing import Any

# NOTE [ Attached to instances ]
#
# 1. A replacement is an attribute of the object whose method it stands for. No class and no module of Megatron is
#    changed, so other models in the process are as they were, and taking the attribute away undoes everything.
# 2. It is an object of a class at the top of a module, which refers to its owner. A copy of the model, by `deepcopy` or
#    pickle, then has replacements of its own that refer to the copy; a closure would go on to work for the original.
# 3. What is found in the object's own attributes before is called as the original and put back by `remove`.


class Replacement:
    """Stands for `owner.name` while it is installed; subclasses define `__call__`."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner = owner
        self.name = name
        self.previous: Callable[..., Any] | None = vars(owner).get(name)

    @property
    def original(self) -> Callable[..., Any]:
        """What `owner.name` was before."""
        if self.previous is not None:
            return self.previous
        return getattr(type(self.owner), self.name).__get__(self.owner, type(self.owner))

    def install(self) -> None:
        setattr(self.owner, self.name, self)

    def remove(self) -> None:
        if self.previous is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.previous)


def replacements(owner: object) -> Iterator[Replacement]:
    """Those that are installed on `owner`."""
    return (value for value in list(vars(owner).values()) if isinstance(value, Replacement))

