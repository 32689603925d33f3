"""Sets overrides into the tree of the file, before anything is interpreted: both are then checked by one reader.

What an override says takes the place of the value at its path. Where the path is a section and the value a mapping, it
is an override of each field that the mapping names: the others stay as the file has them, for a section that loses its
fields in silence would train something else.
"""

from dataclasses import replace

from ac_recipes.reader.compose import MAX_DEPTH, compose
from ac_recipes.reader.mistakes import KeyPath, MistakeLog, Place
from ac_recipes.reader.nodes import Entry, MapNode, Node, RefusedNode, ScalarNode
from ac_recipes.reader.overrides import Override
from ac_recipes.reader.scalars import Kind, kind_of, quoted
from ac_recipes.reader.schema import Field, fields_of, shape_of, tag_of
from ac_recipes.reader.source import check_text
from ac_recipes.reader.variants import named_by_tag
from ac_recipes.reader.wording import got


def value_node(override: Override, log: MistakeLog) -> Node:
    """The value of `override`, read by the rules of the file; every part of it is placed at the flag."""
    place, path = override.place, override.parts
    if len(path) > MAX_DEPTH:
        log.add(place, (), f"more than {MAX_DEPTH} parts in a dotted path")
        return RefusedNode(place)
    if check_text(override.text, place, log) is None:
        return RefusedNode(place)
    if not override.text.strip():
        log.add(place, path, "the value is empty, as an unset variable leaves it; write null or false if that is meant")
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


def put(root: MapNode, override: Override, value: Node, schema: type, log: MistakeLog) -> MapNode:
    """`root`, read by `schema`, with `value` at the path of `override`. Sections that are absent, or null, are made."""
    path = override.parts[:MAX_DEPTH]
    there = root.entries.get(path[0])
    if len(path) == 1 and isinstance(value, MapNode) and there is not None and isinstance(there.node, MapNode):
        value = _merged(there.node, value, fields_of(schema).get(path[0]))
    return _put(root, path, 0, value, log)


def _merged(section: MapNode, value: MapNode, field: Field | None) -> MapNode:
    """`section` with the fields that `value` names. If one of them is the kind of a tagged union, what belongs to other
    kinds alone goes: it has no meaning any more."""
    kinds, kept = shape_of(field.annotation).classes if field else (), dict(section.entries)
    if tag_of(kinds) in value.entries:
        named = named_by_tag(kinds, value)
        own = fields_of(named).keys() if named else ()
        kept = {key: kept[key] for key in kept if key in own or not any(key in fields_of(kind) for kind in kinds)}
    # A key that the file has keeps its place there, as in `_put`.
    set_here = {
        key: Entry(kept[key].key_place if key in kept else new.key_place, new.node)
        for key, new in value.entries.items()
    }
    return MapNode(value.place, kept | set_here, section.incomplete or value.incomplete)


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
