"""What every section of a recipe shares. Loads without torch."""

from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints


class Section:
    """Refuses a value that is not one of a field's choices, when a section is made from Python as well."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            value, choices = getattr(self, name), _choices(kind)
            if choices and value not in choices:
                raise ValueError(f"{name}: {value!r} is not one of {', '.join(map(repr, choices))}")


def _choices(kind: Any) -> tuple[Any, ...]:
    """The values of a `Literal`, or of one that may be `None` as well; nothing for any other type."""
    parts = get_args(kind) if NoneType in get_args(kind) else (kind,)
    named = [part for part in parts if part is not NoneType]
    if len(named) != 1 or get_origin(named[0]) is not Literal:
        return ()
    return get_args(named[0]) + (None,) * (len(parts) - 1)


def at_least(least: int, config: object, name: str) -> None:
    """Refuse a field `name` of `config` below `least`."""
    if (value := getattr(config, name)) < least:
        raise ValueError(f"{name}: {value!r} is below {least}")
