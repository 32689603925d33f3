"""Lists and mappings under construction: what `compose` keeps on its stack until their end comes."""

from ac_recipes.reader.mistakes import KeyPath, MistakeLog, Place
from ac_recipes.reader.nodes import Entry, ListNode, MapNode, Node, RefusedNode
from ac_recipes.reader.scalars import Kind, kind_of, quoted


class OpenList:
    """A list whose end has not come yet. `size` and `height` count itself and everything in it, aliases written out."""

    def __init__(self, place: Place, path: KeyPath, *, anchor: str | None, refused: bool) -> None:
        self.place = place
        self.path = path
        self.anchor = anchor
        self.refused = refused  # it has a tag; what is in it is still read, for its mistakes
        self.size = 1
        self.height = 1
        self._items: list[Node] = []

    def next_path(self) -> KeyPath:
        """Where the node that comes next will stand."""
        return (*self.path, len(self._items))

    def add(self, node: Node, log: MistakeLog) -> None:  # noqa: ARG002 - the signature of OpenMap.add
        self._items.append(node)

    def close(self) -> Node:
        """The finished node."""
        return RefusedNode(self.place) if self.refused else ListNode(self.place, tuple(self._items))


class OpenMap(OpenList):
    """A mapping whose end has not come yet. Nodes arrive in turn as key, value, key, value."""

    def __init__(self, place: Place, path: KeyPath, *, anchor: str | None, refused: bool) -> None:
        super().__init__(place, path, anchor=anchor, refused=refused)
        self._entries: dict[str, Entry] = {}
        self._key: tuple[Place, str | None] | None = None  # between key and value; the text None for a refused key
        self._incomplete = False

    def next_path(self) -> KeyPath:
        return self.path if self._key is None or self._key[1] is None else (*self.path, self._key[1])

    def add(self, node: Node, log: MistakeLog) -> None:
        if self._key is None:
            key = self._read_key(node, log)
            self._key = (node.place, key)
            self._incomplete |= key is None
            return
        (place, key), self._key = self._key, None
        if key is not None:
            self._entries[key] = Entry(place, node)

    def close(self) -> Node:
        return RefusedNode(self.place) if self.refused else MapNode(self.place, self._entries, self._incomplete)

    def _read_key(self, node: Node, log: MistakeLog) -> str | None:
        match node:
            case RefusedNode():
                return None
            case ListNode() | MapNode():
                log.add(node.place, self.path, "a key must be a string, not a list or mapping")
                return None
        if node.plain and node.text == "<<":
            log.add(node.place, self.path, "merge keys ('<<') are not read; write the fields out")
        elif node.plain and kind_of(node.text) is not Kind.STRING:
            log.add(node.place, self.path, f"a key must be a string; quote it: {quoted(node.text)}")
        elif node.text in self._entries:
            first = self._entries[node.text].key_place
            log.add(node.place, (*self.path, node.text), f"duplicate key; first given at line {first.line}")
        else:
            return node.text
        return None
