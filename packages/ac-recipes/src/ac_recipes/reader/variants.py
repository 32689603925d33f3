"""Which dataclass of a union a mapping is meant for."""

from dataclasses import replace
from typing import NamedTuple

from ac_recipes.reader.mistakes import KeyPath, MistakeLog
from ac_recipes.reader.nodes import MapNode, Node, RefusedNode, ScalarNode
from ac_recipes.reader.schema import Shape, fields_of, tag_of, tag_value
from ac_recipes.reader.wording import unexpected


class Variant(NamedTuple):
    """A dataclass to read a mapping into; in a tagged union also the tag field and its other classes."""

    cls: type
    tag: str | None = None
    others: tuple[type, ...] = ()

    @property
    def label(self) -> str | None:
        """The class as a user knows it, `strategy 'ddp'`; None outside a tagged union."""
        return _label(self.cls, self.tag) if self.tag else None

    @property
    def siblings(self) -> dict[str, type]:
        """The other classes of a tagged union, by label."""
        return {_label(cls, self.tag): cls for cls in self.others} if self.tag else {}


def choose(classes: tuple[type, ...], node: MapNode, path: KeyPath, log: MistakeLog) -> tuple[Variant, MapNode] | None:
    """The variant that `node` is meant for and the mapping to read it from; None, with a mistake in `log`, if unknown.

    The tag decides. Without one it is the only class that knows all keys, else the first. If a tag is unknown but near
    enough to a valid one, reading goes on with that one, to find the other mistakes: the mapping returned has no tag.
    """
    tag = tag_of(classes)
    if tag is None or tag not in node.entries:
        knowing = [cls for cls in classes if knows(cls, node)]
        # Several tagged classes know the keys: the first of the union is its default. Untagged: the first that fits.
        inferred = knowing[0] if knowing and (tag is None or len(knowing) == 1) else classes[0]
        return _variant(inferred, classes, tag), node
    named = named_by_tag(classes, node)
    if named is not None:
        return _variant(named, classes, tag), node
    by_value = {tag_value(cls, tag): cls for cls in classes}
    guess = _report_tag(tuple(by_value), node.entries[tag].node, (*path, tag), log)
    if guess is None:
        return None
    untagged = {key: entry for key, entry in node.entries.items() if key != tag}
    return _variant(by_value[guess], classes, tag), replace(node, entries=untagged, incomplete=True)


def named_by_tag(classes: tuple[type, ...], node: MapNode) -> type | None:
    """The class of a tagged union that `node` names; None where it names none, or there is no tag."""
    tag = tag_of(classes)
    named = node.entries[tag].node if tag in node.entries else None
    if not isinstance(named, ScalarNode):
        return None
    return next((cls for cls in classes if tag_value(cls, tag) == named.text), None)


def knows(cls: type, node: MapNode) -> bool:
    """Whether every key of `node` is a field of `cls`."""
    return node.entries.keys() <= fields_of(cls).keys()


def _label(cls: type, tag: str) -> str:
    return f"{tag} {tag_value(cls, tag)!r}"


def _variant(cls: type, classes: tuple[type, ...], tag: str | None) -> Variant:
    return Variant(cls, tag, tuple(other for other in classes if other is not cls))


def _report_tag(values: tuple[str, ...], named: Node, path: KeyPath, log: MistakeLog) -> str | None:
    """Report a tag that is none of `values`; return the one that was probably meant."""
    if isinstance(named, RefusedNode):
        return None
    message, suggestion = unexpected(Shape(choices=values), named)
    log.add(named.place, path, message, suggestion)
    return suggestion
