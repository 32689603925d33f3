"""The tree between YAML text and dataclasses: values not yet interpreted, each with the place where it was written.

Nodes are immutable. An alias makes one node appear at several places of the tree, so a change must build new nodes on
the way down to it (`merge`, `targets`) instead of reaching into the others.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ac_recipes.reader.mistakes import COMMAND_LINE, KeyPath, Place


@dataclass(frozen=True, slots=True)
class ScalarNode:
    """Text. `plain` tells `true` (a boolean, maybe) from `"true"` (a string)."""

    place: Place
    text: str
    plain: bool


@dataclass(frozen=True, slots=True)
class ListNode:
    place: Place
    items: tuple["Node", ...]


class Entry(NamedTuple):
    """One `key: value`. The key has its own place: an unknown field is reported where its name stands."""

    key_place: Place
    node: "Node"


@dataclass(frozen=True, slots=True)
class MapNode:
    """Entries in written order. `incomplete`: something in it was refused already, so what is missing says nothing."""

    place: Place
    entries: Mapping[str, Entry]
    incomplete: bool = False


@dataclass(frozen=True, slots=True)
class RefusedNode:
    """Stands where something was refused; the mistake is in the log, later steps pass over it in silence."""

    place: Place


Node = ScalarNode | ListNode | MapNode | RefusedNode


def place_at(root: Node, path: KeyPath, *, of_key: bool = False, about: str = "") -> Place:
    """Where the value (or the key) at `path` stands; where it was left out, the innermost thing around it.

    about: what is said of the value. Where that is a mapping of the file, and a field named in the text was set on the
    command line, this is the place.
    """
    place = root.place
    for part in path:
        if isinstance(root, MapNode) and part in root.entries:
            entry = root.entries[part]
            root, place = entry.node, entry.key_place if of_key else entry.node.place
        elif isinstance(root, ListNode) and isinstance(part, int) and part < len(root.items):
            root = root.items[part]
            place = root.place
        else:
            break
    else:
        words = set(re.findall(r"\w+", about)) if isinstance(root, MapNode) else set()
        named = [entry.node.place for key, entry in root.entries.items() if key in words] if words else []
        return next((each for each in named if each.file == COMMAND_LINE), place)
    return place


def node_of(value: object, place: Place) -> Node:
    """A node that reads as `value` (None, bool, int, float, str, or lists and string-keyed dicts of these).

    Raises:
        TypeError: `value` is none of these.
    """
    match value:
        case None:
            return ScalarNode(place, "null", plain=True)
        case bool():
            return ScalarNode(place, str(value).lower(), plain=True)
        case int() | float():
            return ScalarNode(place, repr(value), plain=True)
        case str():
            return ScalarNode(place, value, plain=False)
        case list() | tuple():
            return ListNode(place, tuple(node_of(item, place) for item in value))
        case dict():
            return MapNode(place, {key: Entry(place, node_of(item, place)) for key, item in value.items()})
    raise TypeError(f"{value!r} is not plain data")
