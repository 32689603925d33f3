"""Translates the `_target_` of other tools' recipes: known names become fields, every other name is a mistake.

In those tools `_target_` names code to import and call, so a downloaded recipe can run anything. Here it is looked up
in a table and nowhere else. The whole tree is searched, also where the schema would take any data.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from ac_recipes.reader.mistakes import KeyPath, MistakeLog, short
from ac_recipes.reader.nodes import Entry, ListNode, MapNode, Node, RefusedNode, ScalarNode, node_of
from ac_recipes.reader.suggest import closest

TARGET = "_target_"

Targets = Mapping[str, Mapping[str, object]]
"""Known names, and the fields each stands for: `{"torch.optim.AdamW": {"name": "adamw"}}`."""


def translate(node: Node, targets: Targets, path: KeyPath, log: MistakeLog) -> Node:
    """`node` with every `_target_` in it replaced by the fields it stands for. Fields written beside it win."""
    match node:
        case ListNode():
            items = (translate(item, targets, (*path, index), log) for index, item in enumerate(node.items))
            return ListNode(node.place, tuple(items))
        case MapNode():
            entries = {
                key: Entry(entry.key_place, translate(entry.node, targets, (*path, key), log))
                for key, entry in node.entries.items()
            }
            return _expand(replace(node, entries=entries), targets, path, log)
    return node


def _expand(node: MapNode, targets: Targets, path: KeyPath, log: MistakeLog) -> MapNode:
    if TARGET not in node.entries:
        return node
    written = dict(node.entries)
    key_place, name = written.pop(TARGET)
    if isinstance(name, ScalarNode) and name.text in targets:
        fields = {key: Entry(key_place, node_of(value, name.place)) for key, value in targets[name.text].items()}
        return replace(node, entries=fields | written)
    if not isinstance(name, RefusedNode):
        log.add(name.place, (*path, TARGET), *refusal(name, targets))
    # What the name was to stand for is not known, so neither is what is missing beside it.
    return replace(node, entries=written, incomplete=True)


def refusal(name: Node, known: Collection[str]) -> tuple[str, str | None]:
    """The message for a `_target_` that is none of the `known`, and the one that was probably meant."""
    shown = short(name.text)[1:-1] if isinstance(name, ScalarNode) else "..."
    return f"a recipe is data and imports nothing; '{TARGET}: {shown}' is not a known name", _nearest(name, known)


def _nearest(name: Node, targets: Collection[str]) -> str | None:
    """A known name like `name`, or one that ends the same: modules move between releases, classes keep their names."""
    if not isinstance(name, ScalarNode):
        return None
    last, targets = name.text.rpartition(".")[2], sorted(targets)
    same = [known for known in targets if known.rpartition(".")[2] == last]
    return same[0] if same else closest(name.text, targets, cutoff=0.8)
