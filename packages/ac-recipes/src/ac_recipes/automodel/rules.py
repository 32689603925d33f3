"""What can become of one key of an AutoModel recipe. A rule is called with the translation and the written entry."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ac_recipes.reader.mistakes import KeyPath, MistakeLog, Place, show_path
from ac_recipes.reader.nodes import Entry, ListNode, MapNode, Node, RefusedNode, ScalarNode
from ac_recipes.reader.scalars import Kind, kind_of
from ac_recipes.reader.targets import TARGET
from ac_recipes.reader.wording import got

NULL_WORDS = ("none", "None")
"""AutoModel reads these texts as null."""

_FROM_ENVIRONMENT = re.compile(r"\$(\{|[A-Za-z_])")

_NAMED_NONE = ("activation_checkpointing", "dispatcher_recompute_cache")  # here `none` is one of the choices


class LeftOut(NamedTuple):
    """Something the recipe says that the translation does not, with the reason why nothing is lost."""

    place: Place
    path: str
    shown: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place.file}:{self.place.line}:{self.place.column}: {self.path} ({self.shown}): {self.reason}"


@dataclass
class Translation:
    """The recipe that comes of it.

    entries: nested mappings of key to (place of the key, node or mapping).
    null_words: whether `none` is null, as it is to AutoModel.
    written: the place in the recipe that is being translated, for mistakes in the values that are found there.
    """

    log: MistakeLog
    null_words: bool = True
    entries: dict[str, tuple[Place, object]] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    written: KeyPath = ()

    def keep(self, key: str, entry: Entry) -> None:
        """Take over a section of our own words as it is."""
        self._set((key,), entry, entry.node)

    def put(self, path: KeyPath, entry: Entry) -> None:
        """Set the value at `path`. Given twice, under two names, is a mistake; so is one from the environment, which
        AutoModel reads wherever a string is."""
        from_environment = list(_from_environment(entry.node, self.written or path))
        for place, where in from_environment:
            self.log.add(place, where, "AutoModel takes this from the environment; write the value itself")
        if from_environment:
            entry = Entry(entry.key_place, RefusedNode(entry.node.place))
        self._set(path, entry, _null_word(path[-1], entry.node) if self.null_words else entry.node)

    def _set(self, path: KeyPath, entry: Entry, node: Node) -> None:
        section = self.open(path[:-1], entry)
        if section is None:
            self.log.add(entry.key_place, path, f"cannot be set: {show_path(path[:-1])} is no mapping here")
            return
        if path[-1] in section:
            place, there = section[path[-1]]
            if isinstance(there, ScalarNode) and isinstance(entry.node, ScalarNode) and there.text == entry.node.text:
                return
            self.log.add(entry.key_place, path, f"is given twice; line {place.line} says it too")
            return
        section[path[-1]] = (entry.key_place, node)

    def open(self, path: KeyPath, entry: Entry) -> dict[str, tuple[Place, object]] | None:
        """The section at `path`, made if it is not there; None where another value stands in the way."""
        section = self.entries
        for key in path:
            _, below = section.setdefault(key, (entry.key_place, {}))
            if not isinstance(below, dict):
                return None
            section = below
        return section

    def has(self, *path: str) -> bool:
        """Whether something was put at `path`."""
        return self.get(*path) is not None

    def get(self, *path: str) -> object:
        """What was put at `path`: a node, a mapping, or None."""
        found: object = self.entries
        for key in path:
            if not isinstance(found, dict) or key not in found:
                return None
            found = found[key][1]
        return found

    def leave_out(self, path: KeyPath, entry: Entry, reason: str) -> None:
        """Drop it, and remember why that is harmless."""
        self.left_out.append(LeftOut(entry.key_place, show_path(path), got(entry.node), reason))

    def note(self, place: Place, path: KeyPath, shown: str, reason: str) -> None:
        """Say where the same words do not do quite the same."""
        self.left_out.append(LeftOut(place, show_path(path), shown, reason))

    def refuse(self, path: KeyPath, entry: Entry, reason: str) -> None:
        """It cannot be translated."""
        self.log.add(entry.key_place, path, f"not supported: {reason}")


Rule = Callable[[Translation, KeyPath, Entry], None]


def same(translation: Translation, path: KeyPath, entry: Entry) -> None:
    """The same name, the same meaning; the strict reader checks it."""
    translation.put(path, entry)


def to(*path: str, words: Mapping[str, str] | None = None) -> Rule:
    """Another name: the dotted place in our recipe, for a section's own key its name alone. `words` renames values."""

    def rule(translation: Translation, written: KeyPath, entry: Entry) -> None:
        target = path if len(path) > 1 else (*written[:-1], path[0])
        node = entry.node
        if words and isinstance(node, ScalarNode) and node.text in words:
            node = ScalarNode(node.place, words[node.text], plain=True)
        translation.put(target, Entry(entry.key_place, node))

    return rule


def harmless(reason: str) -> Rule:
    """Left out, for a reason that is printed."""
    return lambda translation, path, entry: translation.leave_out(path, entry, reason)


def refused(reason: str) -> Rule:
    """Not supported, whatever the value."""
    return lambda translation, path, entry: translation.refuse(path, entry, reason)


def only(*texts: str, because: str) -> Rule:
    """Left out where the value is one of `texts` (any case; an empty text or `none` is `null`); else not supported."""

    def rule(translation: Translation, path: KeyPath, entry: Entry) -> None:
        if is_text(entry.node, *texts):
            translation.leave_out(path, entry, "is so here")
        else:
            translation.refuse(path, entry, because)

    return rule


def one_of(names: Collection[str], reason: str, *, because: str) -> Rule:
    """Left out, for `reason`, where one of `names` is written, as text or as `_target_`; else not supported."""

    def rule(translation: Translation, path: KeyPath, entry: Entry) -> None:
        node = entry.node
        if isinstance(node, MapNode) and TARGET in node.entries:
            node = node.entries[TARGET].node
        if isinstance(node, ScalarNode) and node.text in names:
            translation.leave_out(path, entry, reason)
        else:
            translation.refuse(path, entry, because)

    return rule


def unless_null(rule: Rule) -> Rule:
    """`rule`, and for `null` the default."""

    def or_null(translation: Translation, path: KeyPath, entry: Entry) -> None:
        if is_text(entry.node, "null"):
            translation.leave_out(path, entry, "null is the default")
        else:
            rule(translation, path, entry)

    return or_null


def is_text(node: object, *texts: str) -> bool:
    """Whether `node` is one of `texts`, in any case; `null` in any spelling, and so are truth values."""
    if not isinstance(node, ScalarNode):
        return False
    text = node.text.lower()
    if node.text in NULL_WORDS or (node.plain and kind_of(node.text) is Kind.NULL):
        text = "null"
    elif node.plain and kind_of(node.text) is Kind.BOOL:
        text = "true" if text in ("true", "yes", "on") else "false"
    elif node.plain and kind_of(node.text) in (Kind.INT, Kind.FLOAT) and float(node.text) == 0:
        text = "0"
    return text in texts


def scope(translation: Translation, path: KeyPath, entry: Entry) -> None:
    """`activation_checkpointing_scope`, of which AutoModel knows more spellings: `language+vision`, `auto`, null."""
    node = entry.node
    written = [node] if isinstance(node, ScalarNode) else node.items if isinstance(node, ListNode) else ()
    if not all(isinstance(item, ScalarNode) for item in written) or not written:
        translation.put(path, entry)
        return
    if is_text(node, "null"):
        translation.leave_out(path, entry, "null is all")
        return
    parts: list[ScalarNode] = []
    for item in written:
        for part in item.text.lower().replace("-", "_").replace("+", ",").split(","):
            name = "all" if part.strip() in ("default", "auto") else part.strip()
            if name and name not in [known.text for known in parts]:
                parts.append(ScalarNode(item.place, name, plain=True))
    translation.put(path, Entry(entry.key_place, parts[0] if len(parts) == 1 else ListNode(node.place, tuple(parts))))


def _from_environment(node: Node, path: KeyPath) -> Iterator[tuple[Place, KeyPath]]:
    """Where in `node`, which stands at `path`, a text names a variable of the environment."""
    match node:
        case ScalarNode(text=text) if _FROM_ENVIRONMENT.search(text):
            yield node.place, path
        case ListNode(items=items):
            for index, item in enumerate(items):
                yield from _from_environment(item, (*path, index))
        case MapNode(entries=entries):
            for key, entry in entries.items():
                yield from _from_environment(entry.node, (*path, key))


def _null_word(key: str, node: Node) -> Node:
    match node:
        case ScalarNode(text=text) if text in NULL_WORDS and key not in _NAMED_NONE:
            return ScalarNode(node.place, "null", plain=True)
        case ListNode():
            return ListNode(node.place, tuple(_null_word("", item) for item in node.items))
        case MapNode():
            entries = {k: Entry(e.key_place, _null_word(k, e.node)) for k, e in node.entries.items()}
            return MapNode(node.place, entries, node.incomplete)
    return node
