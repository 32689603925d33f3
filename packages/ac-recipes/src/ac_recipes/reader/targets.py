"""Refuses the `_target_` of other tools' recipes.

In those tools `_target_` names code to import and call, so a downloaded recipe can run anything. Here a name is at most
looked up in a table, by a rewrite of the recipe (`ac_recipes.automodel`); one that is left after that is a mistake. The
whole tree is searched, also where the schema would take any data.
"""

from collections.abc import Collection
from dataclasses import replace

from ac_recipes.reader.mistakes import KeyPath, MistakeLog, short
from ac_recipes.reader.nodes import Entry, ListNode, MapNode, Node, RefusedNode, ScalarNode
from ac_recipes.reader.suggest import closest

TARGET = "_target_"
WHERE_LISTED = "ac-recipes import --help lists those"


def refuse_targets(node: Node, path: KeyPath, log: MistakeLog) -> Node:
    """`node` without any `_target_`; each is a mistake in `log`."""
    match node:
        case ListNode():
            items = (refuse_targets(item, (*path, index), log) for index, item in enumerate(node.items))
            return ListNode(node.place, tuple(items))
        case MapNode():
            entries = {
                key: Entry(entry.key_place, refuse_targets(entry.node, (*path, key), log))
                for key, entry in node.entries.items()
                if key != TARGET
            }
            if TARGET not in node.entries:
                return replace(node, entries=entries)
            name = node.entries[TARGET].node
            if not isinstance(name, RefusedNode):
                log.add(name.place, (*path, TARGET), *refusal(name))
            # What the name was to stand for is not known, so neither is what is missing beside it.
            return replace(node, entries=entries, incomplete=True)
    return node


def refusal(name: Node, known: Collection[str] = ()) -> tuple[str, str | None]:
    """The message for a `_target_` that is none of the `known`, and the one that was probably meant."""
    shown = short(name.text)[1:-1] if isinstance(name, ScalarNode) else "..."
    message = f"a recipe is data and imports nothing; '{TARGET}: {shown}' is not a known name"
    near = _nearest(name, known)
    return (f"{message}; {WHERE_LISTED}" if known and near is None else message), near


def _nearest(name: Node, targets: Collection[str]) -> str | None:
    """A known name like `name`, or one that ends the same: modules move between releases, classes keep their names."""
    if not isinstance(name, ScalarNode):
        return None
    last, targets = name.text.rpartition(".")[2], sorted(targets)
    same = [known for known in targets if known.rpartition(".")[2] == last]
    return same[0] if same else closest(name.text, targets, cutoff=0.8)
