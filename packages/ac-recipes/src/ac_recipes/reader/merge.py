"""Sets overrides into the tree of the file, before anything is interpreted: both are then checked by one reader."""

from dataclasses import replace

from ac_recipes.reader.compose import MAX_DEPTH, compose
from ac_recipes.reader.mistakes import KeyPath, MistakeLog, Place
from ac_recipes.reader.nodes import Entry, MapNode, Node, RefusedNode, ScalarNode
from ac_recipes.reader.overrides import Override
from ac_recipes.reader.scalars import Kind, kind_of, quoted
from ac_recipes.reader.source import check_text
from ac_recipes.reader.wording import got


def value_node(override: Override, log: MistakeLog) -> Node:
    """The value of `override`, read by the rules of the file; every part of it is placed at the flag."""
    place, path = override.place, override.parts
    if len(path) > MAX_DEPTH:
        log.add(place, (), f"more than {MAX_DEPTH} parts in a dotted path")
        return RefusedNode(place)
    if check_text(override.text, place, log) is None:
        return RefusedNode(place)
    composed = compose(override.text, lambda _: place, log, path)
    if composed.root is None:
        log.amend(f"as a string, quote it: {quoted(override.text)}")
        return RefusedNode(place)
    if override.text[composed.end :].lstrip().startswith("#"):
        # YAML drops a comment in silence; a shell word such as '####' was meant as it stands.
        log.add(place, path, f"'#' begins a comment in YAML; quote it: {quoted(override.text)}")
        return RefusedNode(place)
    return composed.root


def put(root: MapNode, override: Override, value: Node, log: MistakeLog) -> MapNode:
    """`root` with `value` at the path of `override`. Sections that are absent, or null, are made."""
    return _put(root, override.parts[:MAX_DEPTH], 0, value, log)


def _put(node: MapNode, path: KeyPath, depth: int, value: Node, log: MistakeLog) -> MapNode:
    key = path[depth]
    old = node.entries.get(key)
    new = value
    if depth + 1 < len(path):
        below = _section(old, path[: depth + 1], value.place, log)
        if below is None:
            return node
        new = _put(below, path, depth + 1, value, log)
    # A key that the file has keeps its place there: if it is unknown, that is the line to mend.
    return replace(node, entries={**node.entries, key: Entry(old.key_place if old else value.place, new)})


def _section(old: Entry | None, path: KeyPath, place: Place, log: MistakeLog) -> MapNode | None:
    """The mapping at `path` to put something into; None, with a mistake in the log, if another value stands there."""
    match old:
        case None:
            return MapNode(place, {})
        case Entry(node=MapNode() as section):
            return section
        case Entry(node=RefusedNode()):
            return None
        case Entry(node=ScalarNode(plain=True, text=text)) if kind_of(text) is Kind.NULL:
            return MapNode(place, {})
    there = old.node.place
    message = f"cannot set a field of it: it is {got(old.node)} at {there.file}:{there.line}:{there.column}"
    log.add(place, path, message)
    return None
