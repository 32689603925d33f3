"""What the schema allows: annotations of frozen dataclasses, laid flat so that reading can ask simple questions."""

import dataclasses
import types
from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from ac_recipes.reader.mistakes import KeyPath


class ListShape(NamedTuple):
    """A list or tuple: any number of `item`, or exactly the `fixed` ones (`tuple[float, float]`)."""

    make: type[list] | type[tuple]
    item: Any
    fixed: tuple[Any, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What may stand in one place: the members of a union, by sort. Members that hold others keep their annotations."""

    null: bool = False
    boolean: bool = False
    integer: bool = False
    number: bool = False
    string: bool = False
    anything: bool = False
    choices: tuple[str | int | bool, ...] = ()
    lists: tuple[ListShape, ...] = ()
    dicts: tuple[Any, ...] = ()
    classes: tuple[type, ...] = ()


class Field(NamedTuple):
    name: str
    annotation: Any
    required: bool


@cache
def fields_of(cls: type) -> dict[str, Field]:
    """The fields that a mapping for the dataclass `cls` may hold, in order."""
    hints = get_type_hints(cls)
    return {
        field.name: Field(
            field.name,
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(cls)
        if field.init
    }


@cache
def shape_of(annotation: Any) -> Shape:
    """Lay `annotation` flat.

    Raises:
        TypeError: The schema uses a type that no plain data can be read into. The schema is wrong, not a recipe.
    """
    flags: dict[str, bool] = {}
    choices, lists, dicts, classes = [], [], [], []
    names = {type(None): "null", None: "null", bool: "boolean", int: "integer", float: "number", str: "string"}
    for member in _members(annotation):
        origin, arguments = get_origin(member) or member, get_args(member)
        if origin in names:
            flags[names[origin]] = True
        elif origin is Any or origin is object:
            flags["anything"] = True
            lists.append(ListShape(list, Any))
            dicts.append(Any)
        elif origin is Literal:
            choices += [choice for choice in arguments if choice is not None]
            flags["null"] = flags.get("null", False) or None in arguments
        elif origin is list:
            lists.append(ListShape(list, *(arguments or (Any,))))
        elif origin is tuple:
            variadic = not arguments or arguments[1:] == (...,)
            lists.append(ListShape(tuple, arguments[0] if arguments else Any, None if variadic else arguments))
        elif origin is dict and arguments[:1] in ((), (str,)):
            dicts.append(arguments[1] if arguments else Any)
        elif dataclasses.is_dataclass(origin):
            classes.append(origin)
        else:
            raise TypeError(f"a recipe's schema cannot hold {member!r}: no plain data reads as it")
    return Shape(**flags, choices=tuple(choices), lists=tuple(lists), dicts=tuple(dicts), classes=tuple(classes))


def tag_of(classes: tuple[type, ...]) -> str | None:
    """The field that tells the classes of a tagged union apart, or None.

    It has the same name in each, and its type is a `Literal` of one value, another in each class.
    """
    if len(classes) < 2:
        return None
    for name in fields_of(classes[0]):
        values = [tag_value(cls, name) for cls in classes]
        if None not in values and len(set(values)) == len(values):
            return name
    return None


def tag_value(cls: type, name: str) -> str | None:
    """The one value of the field `name` of `cls`; None when there is no such field, or it is not a tag."""
    field = fields_of(cls).get(name)
    if field is None or get_origin(field.annotation) is not Literal:
        return None
    values = get_args(field.annotation)
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None


def homes_of(name: str, schema: type) -> list[KeyPath]:
    """The sections of `schema` that have a field `name`, outermost first; `()` is the recipe itself."""
    homes: list[KeyPath] = []
    seen, ahead = {schema}, deque([((), schema)])
    while ahead:
        section, cls = ahead.popleft()
        if name in fields_of(cls) and section not in homes:
            homes.append(section)
        for field in fields_of(cls).values():
            for inner in shape_of(field.annotation).classes:
                if inner not in seen:
                    seen.add(inner)
                    ahead.append(((*section, field.name), inner))
    return homes


def _members(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation
