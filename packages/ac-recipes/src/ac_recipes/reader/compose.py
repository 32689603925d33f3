"""YAML text to a tree of nodes, refusing on the way what a recipe must not hold.

PyYAML's scanner and parser deliver events; its composer, resolver and constructors are not used. That gives places
without giving YAML a way to make objects, and the tree is built by a loop with a stack of its own, so that a hundred
thousand opening brackets meet a bound and not Python's recursion limit.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import yaml

from ac_recipes.reader.mistakes import KeyPath, MistakeLog, Place, cut, one_line, short
from ac_recipes.reader.nodes import Node, RefusedNode, ScalarNode
from ac_recipes.reader.opened import OpenList, OpenMap
from ac_recipes.reader.source import place_at

MAX_NODES = 10_000
"""Values in a recipe with every alias written out: nested aliases ("billion laughs") end here."""

MAX_DEPTH = 50
"""Lists and mappings inside one another. The later steps recurse, a few Python frames a level."""

Locate = Callable[[yaml.Mark], Place]


class _UnreadableError(Exception):
    """Text from which no tree can be made: nothing after `place` is worth reading."""

    def __init__(self, place: Place, message: str, path: KeyPath | None = None) -> None:
        self.place, self.message, self.path = place, message, path
        super().__init__(message)


class Composed(NamedTuple):
    """What came of a text.

    Attributes:
        root: The tree; a null at the start of an empty text; None if there is no tree, with the reason in the log.
        end: Index of the first character after the root value.
    """

    root: Node | None
    end: int


def locate_in(file: str) -> Locate:
    """Places in a file, from PyYAML's marks, which count from 0."""
    return lambda mark: Place(file, mark.line + 1, mark.column + 1)


def compose(text: str, locate: Locate, log: MistakeLog, path: KeyPath = ()) -> Composed:
    """Parse one YAML document, whose root stands at `path` of the recipe.

    Refused, each at its place: tags, merge keys, keys that are no strings, duplicate keys, recursive aliases, a second
    document, more than `MAX_NODES` values, more than `MAX_DEPTH` levels, and whatever is not YAML.
    """
    composer = _Composer(locate, log, path)
    try:
        for event in _events(text, locate):
            composer.take(event)
    except _UnreadableError as error:
        log.add(error.place, path if error.path is None else error.path, error.message)
        return Composed(None, 0)
    if composer.root is None:
        composer.root = ScalarNode(locate(yaml.Mark("", 0, 0, 0, None, None)), "", plain=True)
    return Composed(composer.root, composer.end)


def _events(text: str, locate: Locate) -> Iterator[yaml.Event]:
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        # The only YAML error that comes without a mark.
        at = place_at("", text, error.position)
        place = locate(yaml.Mark("", error.position, at.line - 1, at.column - 1, None, None))
        raise _UnreadableError(place, f"character {short(chr(error.character))} is not allowed in YAML") from None
    try:
        while loader.check_event():
            yield loader.get_event()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark or loader.get_mark()
        if text[mark.index : mark.index + 1] == "\t":
            raise _UnreadableError(locate(mark), "not valid YAML: a tab cannot indent; use spaces") from None
        problem = one_line(error.problem or str(error))
        if problem.startswith("expected <block end>, but found '<block"):
            problem = "this line is indented differently from the ones beside it"
        raise _UnreadableError(locate(mark), f"not valid YAML: {problem}") from None
    except (ValueError, OverflowError) as error:
        # PyYAML lets errors of chr() and int() through, as for "\UFFFFFFFF"
        raise _UnreadableError(locate(loader.get_mark()), f"not valid YAML: {one_line(str(error))}") from None
    finally:
        loader.dispose()


class _Composer:
    """Builds the tree from events; `_open` holds the lists and mappings around the next node, outermost first."""

    def __init__(self, locate: Locate, log: MistakeLog, path: KeyPath) -> None:
        self.root: Node | None = None
        self.end = 0
        self._locate = locate
        self._log = log
        self._root_path = path
        self._open: list[OpenList] = []
        self._anchors: dict[str, tuple[Node, int, int] | None] = {}  # node, size, height; None while it is open
        self._visited = 0
        self._documents = 0

    def take(self, event: yaml.Event) -> None:
        place = self._locate(event.start_mark)
        match event:
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    raise _UnreadableError(place, "a recipe is one YAML document; a second one begins here")
            case yaml.ScalarEvent():
                refused = self._refuses_tag(event, place)
                node = RefusedNode(place) if refused else ScalarNode(place, event.value, plain=not event.style)
                if event.anchor:
                    self._anchors[event.anchor] = (node, 1, 0)
                self._add(node, 1, 0, event)
            case yaml.AliasEvent():
                self._add(*self._anchored(event.anchor, place), event)
            case yaml.CollectionStartEvent():
                if len(self._open) >= MAX_DEPTH:
                    raise _UnreadableError(place, f"more than {MAX_DEPTH} lists and mappings inside one another")
                kind = OpenMap if isinstance(event, yaml.MappingStartEvent) else OpenList
                refused = self._refuses_tag(event, place)
                self._open.append(kind(place, self._path(), anchor=event.anchor, refused=refused))
                if event.anchor:
                    self._anchors[event.anchor] = None
            case yaml.CollectionEndEvent():
                closed = self._open.pop()
                node = closed.close()
                if closed.anchor:
                    self._anchors[closed.anchor] = (node, closed.size, closed.height)
                self._visited -= closed.size - 1  # its contents were counted as they came
                self._add(node, closed.size, closed.height, event)

    def _add(self, node: Node, size: int, height: int, event: yaml.Event) -> None:
        self._visited += size
        if self._visited > MAX_NODES:
            place = self._locate(event.start_mark)
            raise _UnreadableError(place, f"more than {MAX_NODES} values, with aliases written out")
        if len(self._open) + height > MAX_DEPTH:
            place = self._locate(event.start_mark)
            raise _UnreadableError(place, f"more than {MAX_DEPTH} lists and mappings inside one another")
        if not self._open:
            self.root, self.end = node, event.end_mark.index
            return
        parent = self._open[-1]
        parent.size += size
        parent.height = max(parent.height, height + 1)
        parent.add(node, self._log)

    def _anchored(self, anchor: str, place: Place) -> tuple[Node, int, int]:
        if anchor not in self._anchors:
            raise _UnreadableError(place, f"no anchor '&{cut(anchor)}' before this alias", self._path())
        found = self._anchors[anchor]
        if found is None:
            raise _UnreadableError(place, f"the alias '*{cut(anchor)}' stands inside what it names", self._path())
        return found

    def _path(self) -> KeyPath:
        return self._open[-1].next_path() if self._open else self._root_path

    def _refuses_tag(self, event: yaml.NodeEvent, place: Place) -> bool:
        if event.tag is None:
            return False
        tag = event.tag.replace("tag:yaml.org,2002:", "!!")
        self._log.add(place, self._path(), f"a recipe is data and builds no objects: the tag {short(tag)} is not read")
        return True
