"""A method of one object, replaced for that object alone."""

from collections.abc import Callable
from typing import Any

# NOTE [ Attached to instances ]
#
# 1. A replacement is an attribute of the object whose method it stands for. No class and no module of Megatron is
#    changed, so other models in the process are as they were, and taking the attribute away undoes everything.
# 2. It is an object of a class at the top of a module, which refers to its owner. A copy of the model, by `deepcopy` or
#    pickle, then has replacements of its own that refer to the copy; a closure would go on to work for the original.
# 3. What is found in the object's own attributes before is called as the original and put back by `remove`.
# 4. The object also holds a list of what stands for its methods. So it is noticed when something else has been put in
#    the place since, which would still call the replacement.
_RECORD = "_ac_moe_replaced"


class Replacement:
    """Stands for `owner.name` while it is installed; subclasses define `__call__`."""

    def __init__(self, owner: Any, name: str) -> None:
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
        vars(self.owner).setdefault(_RECORD, []).append(self)


def check_removable(owner: Any) -> None:
    """Raises RuntimeError if something else has taken the place of a replacement of `owner`."""
    for replacement in vars(owner).get(_RECORD, ()):
        now = vars(owner).get(replacement.name)
        if now is not replacement:
            raise RuntimeError(
                f"{type(owner).__name__}.{replacement.name} was replaced after ac_moe.megatron.enable, by {now!r}; "
                "undo that first, or the cache would stay in part"
            )


def remove_replacements(owner: Any) -> None:
    """Puts every method of `owner` back."""
    for replacement in reversed(vars(owner).pop(_RECORD, [])):
        if replacement.previous is None:
            delattr(owner, replacement.name)
        else:
            setattr(owner, replacement.name, replacement.previous)
