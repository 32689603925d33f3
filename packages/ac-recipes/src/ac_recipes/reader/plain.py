"""Dataclasses back to plain data and YAML text, such that `read_recipe` reads the text to an equal value."""

import dataclasses
import math

import yaml

from ac_recipes.reader.mistakes import KeyPath, show_path
from ac_recipes.reader.nodes import ListNode, MapNode, Node, ScalarNode
from ac_recipes.reader.scalars import Kind, kind_of


def to_plain(value: object) -> dict[str, object]:
    """The mapping that reads back as `value`, a dataclass instance: every field, defaults included, in field order.

    Raises:
        TypeError: A field holds what no recipe can say: an object, a key that is no string.
        ValueError: A field holds a number that is not finite.
    """
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        raise TypeError(f"expected a dataclass instance, got {value!r}")
    return _plain(value, ())


def dump(value: object) -> str:
    """`to_plain(value)` as YAML text, in field order. Raises as `to_plain`."""
    return dump_data(to_plain(value))


def plain_of(node: Node) -> object:
    """What stands at `node`, a tree without mistakes, as plain data."""
    match node:
        case MapNode():
            return {key: plain_of(entry.node) for key, entry in node.entries.items()}
        case ListNode():
            return [plain_of(item) for item in node.items]
        case ScalarNode(plain=True, text=text):
            kind = kind_of(text)
            if kind is Kind.NULL:
                return None
            if kind is Kind.BOOL:
                return text.lower() in ("true", "yes", "on")
            return int(text) if kind is Kind.INT else float(text) if kind is Kind.FLOAT else text
    return node.text


def dump_data(data: object) -> str:
    """Plain data as YAML text that this reader reads back to the same."""
    return yaml.dump(
        data,
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=True,
        width=1 << 20,  # folding long strings is legal, and hard to read
    )


def _plain(value: object, path: KeyPath) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{show_path(path)}: a recipe cannot hold {value}")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, (*path, index)) for index, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, (*path, key)) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return {name: _plain(getattr(value, name), (*path, name)) for name in fields}
    raise TypeError(f"{show_path(path)}: a recipe cannot hold {value!r}")


class _Dumper(yaml.SafeDumper):
    """Quotes by the rules of this reader: PyYAML leaves `1e-4` and `nan` bare, which are not strings here."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - writes shared values out instead of `&id001`
        return True

    def represent_text(self, text: str) -> yaml.Node:
        style = None
        if not text.isprintable():
            style = '"'  # the only style that keeps every line break and control character as it is
        elif kind_of(text) is not Kind.STRING:
            style = "'"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def represent_short_list(self, items: list) -> yaml.Node:
        flat = not any(isinstance(item, list | dict) for item in items)
        return self.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=flat)


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(list, _Dumper.represent_short_list)
