"""The tree to dataclasses. Reading goes on after a mistake; a dataclass is made only if all its fields were right."""

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ac_recipes.reader.mistakes import KeyPath, MistakeLog, one_line
from ac_recipes.reader.nodes import ListNode, MapNode, Node, RefusedNode, ScalarNode, place_at
from ac_recipes.reader.scalars import UNREAD, read_scalar
from ac_recipes.reader.schema import ListShape, Shape, fields_of, shape_of
from ac_recipes.reader.suggest import closest_named_in
from ac_recipes.reader.unknown import unknown_field
from ac_recipes.reader.variants import Variant, choose, knows
from ac_recipes.reader.wording import unexpected

T = TypeVar("T")
_Read = Callable[[T, Any, KeyPath], object]

_MOST_GUESSES = 100  # guessing takes the time: of ten thousand unknown keys, the first hundred get a suggestion


class Structurer:
    """Reads nodes as what a schema asks for. Methods return the value, or `UNREAD` with the mistakes in the log."""

    def __init__(self, schema: type, log: MistakeLog) -> None:
        self._schema = schema
        self._log = log

    def read_recipe(self, root: MapNode) -> object:
        return self._dataclass(Variant(self._schema), root, ())

    def _value(self, annotation: object, node: Node, path: KeyPath) -> object:
        shape = shape_of(annotation)
        match node:
            case RefusedNode():
                return UNREAD
            case ScalarNode():
                value = read_scalar(shape, node)
                if value is not UNREAD:
                    return value
            case ListNode() if shape.lists:
                return self._first_sound(shape.lists, self._list, node, path)
            case MapNode() if shape.classes or shape.dicts:
                return self._mapping(shape, node, path)
        self._log.add(node.place, path, *unexpected(shape, node))
        return UNREAD

    def _mapping(self, shape: Shape, node: MapNode, path: KeyPath) -> object:
        if not shape.classes or (shape.dicts and not any(knows(cls, node) for cls in shape.classes)):
            return self._first_sound(shape.dicts, self._dict, node, path)
        chosen = choose(shape.classes, node, path, self._log)
        return UNREAD if chosen is None else self._dataclass(*chosen, path)

    def _list(self, shape: ListShape, node: ListNode, path: KeyPath) -> object:
        annotations = shape.fixed or (shape.item,) * len(node.items)
        if len(annotations) != len(node.items):
            self._log.add(node.place, path, f"expected {len(annotations)} items, got {len(node.items)}")
            return UNREAD
        pairs = enumerate(zip(annotations, node.items, strict=True))
        values = [self._value(annotation, item, (*path, index)) for index, (annotation, item) in pairs]
        return UNREAD if any(value is UNREAD for value in values) else shape.make(values)

    def _dict(self, annotation: object, node: MapNode, path: KeyPath) -> object:
        values = {key: self._value(annotation, entry.node, (*path, key)) for key, entry in node.entries.items()}
        return UNREAD if any(value is UNREAD for value in values.values()) else values

    def _first_sound(self, options: Sequence[T], read: _Read, node: Node, path: KeyPath) -> object:
        """Read `node` as the first of `options` that makes no mistake; if all do, report those of the first."""
        for option in options if len(options) > 1 else ():
            start = len(self._log.mistakes)
            value = read(option, node, path)
            if value is not UNREAD:
                return value
            del self._log.mistakes[start:]
        return read(options[0], node, path)

    def _dataclass(self, variant: Variant, node: MapNode, path: KeyPath) -> object:
        fields = fields_of(variant.cls)
        values, misspelt = {}, set()
        for name, entry in node.entries.items():
            if name in fields:
                values[name] = self._value(fields[name].annotation, entry.node, (*path, name))
            else:
                guess = len(self._log.mistakes) < _MOST_GUESSES
                told = unknown_field(name, variant, path, self._schema) if guess else ("unknown field", None)
                self._log.add(entry.key_place, (*path, name), *told)
                misspelt.add(told[1])
        if node.incomplete:
            return UNREAD
        missing = [field.name for field in fields.values() if field.required and field.name not in node.entries]
        for name in filter(lambda name: name not in misspelt, missing):
            self._log.add(node.place, path, f"missing required field {name!r}")
        if missing or len(values) < len(node.entries) or any(value is UNREAD for value in values.values()):
            return UNREAD
        return self._construct(variant.cls, values, node, path)

    def _construct(self, cls: type, values: dict[str, object], node: MapNode, path: KeyPath) -> object:
        """Call the dataclass. What its `__post_init__` refuses, it reports in the form "FIELD: what is wrong", or
        "FIELD.FIELD: what is wrong" about a field further down."""
        try:
            return cls(**values)
        except (ValueError, TypeError) as error:
            message = one_line(str(error)) or type(error).__name__
        relative: KeyPath = ()
        told = re.fullmatch(r"(\w+)((?:\.\w+)*): (.+)", message)
        if told and told[1] in fields_of(cls):
            relative, message = (told[1], *told[2].split(".")[1:]), told[3]
        self._log.add(place_at(node, relative, about=message), (*path, *relative), message, closest_named_in(message))
        return UNREAD
