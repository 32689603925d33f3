"""Setting a value in YAML text and leaving the rest of it, comments and all, as it is."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node

_STEP = 2
"""Columns by which what is new is set in."""


def set_in_text(text: str, path: Sequence[str], value: str | Mapping[str, Any]) -> str:
    """`text` with `value` at `path`: in the place of what is there, else as the last entry of the innermost mapping on
    the way that is there.

    value: YAML on one line, or a mapping that is written out in block style where its surroundings are.

    Raises:
        ValueError: something on the way is no mapping, or an alias, which stands for more than this place.
        yaml.YAMLError: `text` is not YAML.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, MappingNode):
        raise ValueError("the text is no mapping")
    if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, Loader=yaml.SafeLoader)):
        raise ValueError("the text has aliases")
    return _set(text, root, list(path), value)


def _set(text: str, mapping: Node, path: list[str], value: str | Mapping[str, Any]) -> str:
    if not isinstance(mapping, MappingNode):
        raise ValueError(f"what holds {path[0]!r} is no mapping")
    found = next(((k, v) for k, v in mapping.value if k.value == path[0]), None)
    if found is not None and len(path) > 1:
        return _set(text, found[1], path[1:], value)
    if found is not None:
        key, old = found
        start = key.end_mark.index
        rest = text[_end(old) :] if _end(old) > start else text[text.index(":", start) + 1 :]
        return text[:start] + ":" + _written(value, key.start_mark.column, flow=mapping.flow_style) + rest
    for name in reversed(path[1:]):
        value = {name: yaml.safe_load(value) if isinstance(value, str) else value}
    if mapping.flow_style:
        place = _end(mapping) - 1
        comma = ", " if mapping.value else ""
        return f"{text[:place].rstrip()}{comma}{path[0]}:{_written(value, 0, flow=True)}{text[place:]}"
    column = mapping.value[0][0].start_mark.column
    end = _end(mapping)
    line_end = text.find("\n", end)
    place = len(text) if line_end < 0 else line_end
    return f"{text[:place]}\n{' ' * column}{path[0]}:{_written(value, column, flow=False)}{text[place:]}"


def _written(value: str | Mapping[str, Any], column: int, *, flow: bool | None) -> str:
    """What comes behind a key at `column` and its colon."""
    if isinstance(value, str):
        return f" {value}"
    if flow:
        return f" {_one_line(value)}"
    indent = "\n" + " " * (column + _STEP)
    entries = []
    for name, entry in value.items():
        inside = _written(entry, column + _STEP, flow=False) if isinstance(entry, Mapping) else f" {_one_line(entry)}"
        entries.append(f"{indent}{_one_line(name)}:{inside}")
    return "".join(entries)


def _one_line(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=1 << 20, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _end(node: Node) -> int:
    """Where a node's last character is. A block mapping's own mark is behind the comments that follow it."""
    if isinstance(node, yaml.ScalarNode) or node.flow_style or not node.value:
        return node.end_mark.index
    last = node.value[-1]
    return _end(last[1] if isinstance(node, MappingNode) else last)
