"""What every section of a recipe shares. Loads without torch."""

from typing import Literal, get_args, get_origin, get_type_hints


class Section:
    """Refuses a value that is not one of a field's choices, when a section is made from Python as well."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            value, choices = getattr(self, name), get_args(kind)
            if get_origin(kind) is Literal and value not in choices:
                raise ValueError(f"{name}: {value!r} is not one of {', '.join(map(repr, choices))}")


def at_least(least: int, config: object, name: str) -> None:
    """Refuse a field `name` of `config` below `least`."""
    if (value := getattr(config, name)) < least:
        raise ValueError(f"{name}: {value!r} is below {least}")
